"""Seeded faults: each is a plausible mistake in the product, which the checker has to find in the recorded history."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from history.recorder import RecordingHandle, pair
from kvcached.ledger import binding, publication
from kvcached.ledger.addressees import Obstacle, look_up
from kvcached.ledger.subscription import Subscription
from kvcached.light_dataclasses import replace
from kvcached.values import Bound, Update, pack

if TYPE_CHECKING:
    from kvcached.ledger.contents import AuditRecord

ENGINE_FAULTS = (
    "compares_with_last_seen",
    "looks_at_one_member",
    "ignores_the_limit",
    "applies_again",
    "takes_caps_for_limits",
)
PUBLISHER_FAULTS = ("stores_plainly", "takes_equal_for_own", "writes_the_other_word", "shares_revisions")
RANK_FAULTS = ("rank_skips",)

SLOTS_AT, SLOT_BYTES, DESIRED_AT = 4096, 1024, {Bound.LIMIT: 192, Bound.CAP: 200}  # native/layout.h


class ComparesWithLastSeen(Subscription):
    """Takes a pair for old once it was offered, settled or not."""

    _seen: tuple[Update, ...] = ()

    def poll(self) -> Update | None:
        update = super().poll()
        if update is None or update in self._seen:
            return None
        self._seen = (*self._seen, update)
        return update


class LooksAtOneMember(Subscription):
    """Takes what the first member carries for published."""

    def poll(self) -> Update | None:
        registration = self._settlement.registration
        assert registration is not None
        for bound, settled in self._settlement._bounds.items():
            update = registration.words(bound)[0]
            assert update is not None
            if update.revision > settled._settled_revision:
                return update
        return None


class IgnoresTheLimit(Subscription):
    """Compares the revisions of the members and takes the limit from anywhere."""

    def poll(self) -> Update | None:
        update = super().poll()
        return update and Update(update.revision, update.limit_tokens ^ 1, update.bound)


class AppliesAgain(Subscription):
    """Offers what was settled before, now and then."""

    _polled = 0

    def poll(self) -> Update | None:
        update = super().poll()
        self._polled += 1
        taken = self._settlement._bounds[Bound.CAP].taken
        again = update is None and taken.revision > 0 and self._polled % 50 == 0
        return taken if again else update


class TakesCapsForLimits(Subscription):
    """Forgets what an update bounds."""

    def poll(self) -> Update | None:
        update = super().poll()
        return update and Update(update.revision, update.limit_tokens)


def subscription_class(fault: str) -> type[Subscription]:
    """Return the engine's side, broken as ordered."""
    classes = {
        "compares_with_last_seen": ComparesWithLastSeen,
        "looks_at_one_member": LooksAtOneMember,
        "ignores_the_limit": IgnoresTheLimit,
        "applies_again": AppliesAgain,
        "takes_caps_for_limits": TakesCapsForLimits,
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
        found = slot.desired_of(update.bound)
        raised = found.revision < update.revision
        if raised:
            with open(self.path, "r+b", buffering=0) as file:
                place = SLOTS_AT + index * SLOT_BYTES + DESIRED_AT[update.bound]
                os.pwrite(file.fileno(), pack(update).to_bytes(8, sys.byteorder), place)
        end = time.monotonic_ns()
        self.raises.append([start, end, self.member, update.bound.value, pair(update), raised, pair(found)])
        return raised, found


class TakesEqualForOwn(RecordingHandle):
    """Takes a word of the revision that it wanted to write for its own, whatever its limit."""

    def raise_desired(
        self, index: int, incarnation: int, update: Update, record: AuditRecord | None = None, *, floor: int = 0
    ) -> tuple[bool, Update]:
        raised, found = super().raise_desired(index, incarnation, update, record, floor=floor)
        equal = found.revision == update.revision
        return raised or equal, Update(update.revision - 1, 0, update.bound) if equal else found


class WritesTheOtherWord(RecordingHandle):
    """Writes the cap into the limit's word."""

    def raise_desired(
        self, index: int, incarnation: int, update: Update, record: AuditRecord | None = None, *, floor: int = 0
    ) -> tuple[bool, Update]:
        start = time.monotonic_ns()
        wrong = Update(update.revision, update.limit_tokens)
        raised, found = super(RecordingHandle, self).raise_desired(index, incarnation, wrong, record, floor=floor)
        end = time.monotonic_ns()
        found = Update(found.revision, found.limit_tokens, update.bound)
        self.raises.append([start, end, self.member, update.bound.value, pair(update), raised, pair(found)])
        return raised, found


def look_up_over_both(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as what it stands in for
    """Take the highest revision of either word for that of both."""
    found = look_up(*arguments, **named)
    if isinstance(found, Obstacle):
        return found
    slots = [member.slot for replica in found.replicas for member in replica.members]
    return replace(found, newest=max(slot.desired_of(bound).revision for slot in slots for bound in Bound))


def break_publisher(fault: str) -> None:
    """Break this process's publications as ordered."""
    handles = {
        "stores_plainly": StoringHandle,
        "takes_equal_for_own": TakesEqualForOwn,
        "writes_the_other_word": WritesTheOtherWord,
    }
    if fault == "shares_revisions":
        publication.look_up = look_up_over_both  # type: ignore[attr-defined]
    if fault in handles:
        binding.Handle = handles[fault]  # type: ignore[misc]


def rank_skips(fault: str, rank: int, applied: int) -> bool:
    """Return whether a rank passes over an update, as ordered."""
    return fault == "rank_skips" and rank == 2 and applied == 3
