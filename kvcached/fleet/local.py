"""The ledger directory of one node as its agent sees it: who lives in it, what they were told, and what they report."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.fleet.target_status import TargetState
from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError
from kvcached.ledger.doorbells import Doorbells
from kvcached.ledger.publication import publish
from kvcached.ledger.replicas import desired_pairs, find_conflict, newest_revision
from kvcached.ledger.snapshot import Snapshot, is_unchanged, look_again, look_at
from kvcached.values import UNLIMITED, Bound, Outcome, incarnation_text, kept_tokens

if TYPE_CHECKING:
    from kvcached.ledger.replicas import Replica
    from kvcached.ledger.results import PublicationResult


@dataclass(frozen=True)
class LocalTarget:
    """All live replicas of one instance name in a ledger directory."""

    name: str
    replicas: tuple[Replica, ...]

    @property
    def incarnation(self) -> str:
        """What tells this instance from its successors."""
        return incarnation_text(replica.slot.incarnation for replica in self.replicas)

    @property
    def obstacle(self) -> str:
        """Why nothing should be published now: two engines of one name, or members that are not here yet."""
        missing = [replica.missing for replica in self.replicas if replica.missing]
        return find_conflict(self.replicas) or (f"members {missing[0]} have no live slot" if missing else "")

    def revision(self, bound: Bound) -> int:
        """Return the highest revision that was published to it."""
        return newest_revision(self.replicas, bound)

    def desires(self, tokens: int, bound: Bound) -> bool:
        """Return whether all members were told these tokens by one publication."""
        told = set(desired_pairs(self.replicas, bound))
        return len(told) == 1 and self.revision(bound) > 0 and told.pop().limit_tokens == tokens

    def progress(self, tokens: int, bound: Bound) -> tuple[str, str]:
        """Return the state and the reason of the replica that is furthest from these tokens."""
        found = [_progress(replica, tokens, bound) for replica in self.replicas]
        behind = [one for one in found if one[0] != TargetState.APPLIED]
        return behind[0] if behind else (TargetState.APPLIED.value, "")

    def publish(self, tokens: int, bound: Bound, ledger_dir: str, note: str) -> PublicationResult:
        """Publish, unless somebody else did since this look, or the instance is another one by now."""
        revision, incarnation = self.revision(bound), self.incarnation
        return publish(
            tokens,
            self.name,
            ledger_dir,
            bound=bound,
            if_revision=revision,
            if_incarnation=incarnation,
            note=note,
        )


def _progress(replica: Replica, tokens: int, bound: Bound) -> tuple[str, str]:
    report = replica.slot.report
    answer = report.of(bound)
    wanted = newest_revision([replica], bound)
    if answer.outcome is Outcome.UNSUPPORTED_ENGINE or (answer.outcome.rejected and answer.settled_revision >= wanted):
        return answer.outcome.value, answer.reason
    if answer.applied.revision < wanted or answer.applied.limit_tokens != tokens:
        return TargetState.APPLYING.value, ""
    if bound is Bound.LIMIT:
        kept = kept_tokens(tokens, replica.slot.identity.block_tokens)
        if kept == UNLIMITED or report.idle_tokens <= kept:
            return TargetState.APPLIED.value, ""
    state = answer.outcome
    settled = bound is Bound.CAP or state not in {Outcome.APPLIED, Outcome.STARTUP}
    return (state.value, answer.reason) if settled else (TargetState.APPLYING.value, "")


SLOTS_S = 1.0
"""How old what was read of the slots may be where no bell rang: an engine that is killed rings none."""


class LocalLedgers:
    """A ledger directory that is looked at again and again. For the agent's thread, except :meth:`wake`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._directory: LedgerDirectory | None = None
        self._snapshot = Snapshot(path)
        self._rung = threading.Event()
        self._bells = Doorbells((), self._rung)
        self._stale_at = 0.0

    def look(self) -> tuple[tuple[LocalTarget, ...], str]:
        """Return all targets, by name, and why the directory could not be looked at, if so. Raises nothing.

        Whether files came or went is looked up each time, and the slots after a bell or ``SLOTS_S`` seconds.
        """
        if self._directory is not None and not self._is_current(self._directory):
            self.close()
        if self._directory is None:
            try:
                self._directory = LedgerDirectory(self.path, writable=False)
            except LedgerDirectoryError as error:
                return (), str(error)
            self._snapshot = look_at(self._directory)
            self._bells = Doorbells(self._snapshot.ledgers, self._rung)
        elif time.monotonic() >= self._stale_at:
            self._stale_at = time.monotonic() + SLOTS_S
            self._snapshot = look_again(self.path, self._snapshot.files)
        found = tuple(LocalTarget(name, self._snapshot.of(name).replicas) for name in self._snapshot.names)
        return found, "; ".join(self._snapshot.unseen)

    def wait(self, timeout_s: float) -> None:
        """Sleep until an engine, a publisher or :meth:`wake` rings, or until the time is over."""
        if self._rung.wait(timeout_s):
            self._rung.clear()
            self._stale_at = 0.0

    def wake(self) -> None:
        """End a :meth:`wait`, or the next one. Any thread, and signal handlers."""
        self._rung.set()

    def _is_current(self, directory: LedgerDirectory) -> bool:
        with suppress(LedgerDirectoryError):
            return is_unchanged(directory, self._snapshot)
        return False

    def close(self) -> None:
        """Give up the directory; the next look opens it again."""
        self._bells.close()
        if self._directory is not None:
            self._directory.close()
        self._directory = None
