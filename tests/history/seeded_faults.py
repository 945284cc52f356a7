"""Seeded faults: each is a plausible mistake in the product, which the checker has to find in the recorded history."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from history.recorder import RecordingHandle, pair
from kvcached.ledger import binding
from kvcached.ledger.subscription import Subscription
from kvcached.values import Update, pack

if TYPE_CHECKING:
    from kvcached.ledger.contents import AuditRecord

ENGINE_FAULTS = ("compares_with_last_seen", "looks_at_one_member", "ignores_the_limit", "applies_again")
PUBLISHER_FAULTS = ("stores_plainly", "takes_equal_for_own")
RANK_FAULTS = ("rank_skips",)

SLOTS_AT, SLOT_BYTES, DESIRED_AT = 4096, 512, 128  # native/layout.h


class ComparesWithLastSeen(Subscription):
    """Takes a pair for old once it was offered, settled or not."""

    _seen = 0

    def poll(self) -> Update | None:
        update = super().poll()
        if update is None or update.revision == self._seen:
            return None
        self._seen = update.revision
        return update


class LooksAtOneMember(Subscription):
    """Takes what the first member carries for published."""

    def poll(self) -> Update | None:
        registration = self._settlement.registration
        assert registration is not None
        update = registration.words()[0]
        assert update is not None
        return update if update.revision > self._settlement._settled_revision else None


class IgnoresTheLimit(Subscription):
    """Compares the revisions of the members and takes the limit from anywhere."""

    def poll(self) -> Update | None:
        update = super().poll()
        return update and Update(update.revision, update.limit_tokens ^ 1)


class AppliesAgain(Subscription):
    """Offers what was settled before, now and then."""

    _polled = 0

    def poll(self) -> Update | None:
        update = super().poll()
        self._polled += 1
        again = update is None and self._settlement.taken.revision > 0 and self._polled % 50 == 0
        return self._settlement.taken if again else update


def subscription_class(fault: str) -> type[Subscription]:
    """Return the engine's side, broken as ordered."""
    classes = {
        "compares_with_last_seen": ComparesWithLastSeen,
        "looks_at_one_member": LooksAtOneMember,
        "ignores_the_limit": IgnoresTheLimit,
        "applies_again": AppliesAgain,
    }
    return classes.get(fault, Subscription)


class StoringHandle(RecordingHandle):
    """Reads, compares and stores, instead of comparing and swapping at once."""

    def raise_desired(
        self,
        index: int,
        _incarnation: int,
        update: Update,
        _record: AuditRecord | None = None,
        *,
        floor: int = 0,
    ) -> tuple[bool, Update]:
        del floor
        start = time.monotonic_ns()
        slot = self.read_slot(index)
        assert slot is not None
        found = slot.desired
        raised = found.revision < update.revision
        if raised:
            with open(self.path, "r+b", buffering=0) as file:
                os.pwrite(
                    file.fileno(), pack(update).to_bytes(8, sys.byteorder), SLOTS_AT + index * SLOT_BYTES + DESIRED_AT
                )
        end = time.monotonic_ns()
        self.raises.append([start, end, self.member, pair(update), raised, pair(found)])
        return raised, found


class TakesEqualForOwn(RecordingHandle):
    """Takes a word of the revision that it wanted to write for its own, whatever its limit."""

    def raise_desired(
        self, index: int, incarnation: int, update: Update, record: AuditRecord | None = None, *, floor: int = 0
    ) -> tuple[bool, Update]:
        raised, found = super().raise_desired(index, incarnation, update, record, floor=floor)
        equal = found.revision == update.revision
        return raised or equal, Update(update.revision - 1, 0) if equal else found


def break_publisher(fault: str) -> None:
    """Break this process's publications as ordered."""
    handles = {"stores_plainly": StoringHandle, "takes_equal_for_own": TakesEqualForOwn}
    if fault in handles:
        binding.Handle = handles[fault]  # type: ignore[misc]


def rank_skips(fault: str, rank: int, applied: int) -> bool:
    """Return whether a rank passes over an update, as ordered."""
    return fault == "rank_skips" and rank == 2 and applied == 3
