"""What was published of one bound to a replica, and what of it is settled: values only, read and written elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.ledger.resumption import resume_from
from kvcached.values import UNLIMITED, Bound, BoundReport, Outcome, Update

if TYPE_CHECKING:
    from collections.abc import Sequence


class BoundSettlement:
    """The pairs of one bound. Knows no other bound, so that the two of a slot cannot mix. Not safe for threads."""

    def __init__(self, startup: Update) -> None:
        """Begin with nothing published."""
        self.taken = startup
        """The newest pair that all members carried."""
        self.unsettled: Update | None = None
        """What the engine has yet to apply or reject."""
        self._startup = startup
        self._settled_revision = 0
        self._invalid = Update(0, 0, startup.bound)
        self._answer: BoundReport | None = None

    @property
    def has_taker(self) -> bool:
        """Whether updates can be handed to the engine: it said that it knows this bound, or it is the limit.

        An engine that knows limits only would take a cap for one.
        """
        if self._startup.bound is Bound.LIMIT:
            return True
        return self._answer is not None and self._answer.outcome is not Outcome.UNSUPPORTED_ENGINE

    def offer(self, update: Update | None) -> bool:
        """Take what all members carry, if it is newer than what was taken; return whether it was."""
        if update is None or update.revision <= self.taken.revision:
            return False
        self._take(update)
        return True

    def answer(self, answer: BoundReport) -> bool:
        """Take the engine's own answer; return whether it settled an update."""
        self._answer = answer
        self._settled_revision = max(self._settled_revision, answer.settled_revision)
        if self.unsettled is None or self.unsettled.revision > self._settled_revision:
            return False
        self.unsettled = None
        return True

    def said(self, answer: BoundReport) -> BoundReport:
        """Return what is written for ``answer``: the engine's own words, and a rejection of what it never gets."""
        taken, invalid = self.taken, self._invalid
        if invalid.revision > answer.settled_revision:
            reason = f"revision {invalid.revision} has the invalid {self._name} {invalid.limit_tokens}"
            return BoundReport(answer.applied, invalid.revision, Outcome.REJECTED_INVALID, reason)
        if not self.has_taker and taken.revision > answer.settled_revision:
            return BoundReport(answer.applied, taken.revision, answer.outcome, answer.reason)
        return answer

    def resume(self, words: Sequence[Update | None]) -> bool:
        """Take the pair that a new registration begins with, after the slots with these ``words`` were given up.

        Returns whether it is another one than before.
        """
        after = resume_from(words, self.taken, self._in_force())
        if after == self.taken:
            return False
        self._take(after)
        return True

    @property
    def is_invalid(self) -> bool:
        """Whether the pair that was taken last makes no sense, which only a broken or hostile publisher writes."""
        return self.taken.limit_tokens < UNLIMITED

    @property
    def _name(self) -> str:
        return self._startup.bound.value

    def _take(self, update: Update) -> None:
        self.taken = update
        self.unsettled = None if self.is_invalid else update
        if self.is_invalid:
            self._invalid = update
            self._settled_revision = max(self._settled_revision, update.revision)

    def _in_force(self) -> int:
        if self.unsettled is not None and self.has_taker:
            return self.unsettled.limit_tokens  # on its way to the engine
        return self._startup.limit_tokens if self._answer is None else self._answer.applied.limit_tokens
