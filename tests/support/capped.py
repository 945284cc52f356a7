"""What an engine that knows limits and caps applies, without an engine: for tests of the way there and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.light_dataclasses import replace
from kvcached.policy import RetentionPolicy
from kvcached.values import UNLIMITED, Bound, BoundReport, Outcome, Report, Update
from support.toys import ToyCache

if TYPE_CHECKING:
    from kvcached.values import Identity


class CappedPolicy:
    """Applies limits by the product's policy, and takes every cap over at once, each newer one than the last."""

    def __init__(self, identity: Identity, idle: int = 0) -> None:
        """Begin with the startup values of ``identity``."""
        self._limit = RetentionPolicy(ToyCache(idle=idle), identity.startup_limit_tokens)
        self.cap = BoundReport(identity.startup(Bound.CAP), 0, Outcome.STARTUP, "")

    def update(self, update: Update) -> None:
        """Apply an update to what it bounds."""
        if update.bound is Bound.LIMIT:
            self._limit.update(update)
        elif update.revision > self.cap.settled_revision:
            self.cap = BoundReport(update, update.revision, Outcome.APPLIED, "")

    def settled(self, bound: Bound) -> int:
        """Return the newest revision of ``bound`` that was applied."""
        return self.cap.settled_revision if bound is Bound.CAP else self._limit.settled_revision

    def report(self) -> Report:
        """Return what an engine that returns memory would say."""
        return replace(self._limit.report(), cap=self.cap, token_bytes=1024, pool_bytes=4096, returns="yes")


NO_CAP_YET = Update(0, UNLIMITED, Bound.CAP)
"""The cap's pair of an engine without a startup cap."""
