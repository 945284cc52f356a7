"""What the policies of a limit and of a cap have in common: one bound in force, and what became of publications.

All methods are for the scheduler's own thread.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvcached.values import Outcome

if TYPE_CHECKING:
    from kvcached.values import Update

_log = logging.getLogger(__name__)


class BoundPolicy(ABC):
    """One bound of this process: stored first and enforced second, whatever the engine's calls raise."""

    def __init__(self, startup: Update) -> None:
        """Have ``startup`` in force until the first update."""
        self.draining = False
        """Whether the engine has to keep stepping, idle or not: what was begun goes on at the next step."""
        self._applied = startup
        self._settled_revision = 0
        self._outcome = Outcome.STARTUP
        self._reason = ""
        self._logged_errors: set[type[Exception]] = set()

    @property
    def settled_revision(self) -> int:
        """The newest revision that was applied or rejected here."""
        return self._settled_revision

    def update(self, update: Update) -> None:
        """Take ``update`` over: store it first, then do the first chunk of what it asks for.

        A revision that is not newer than the settled one is ignored, so delivering an update twice does no harm.
        """
        if update.revision <= self._settled_revision:
            return
        self._settled_revision = update.revision
        self._reason = ""
        self._store(update)
        self._enforce()

    def reject(self, update: Update, outcome: Outcome, reason: str) -> None:
        """Settle ``update`` without applying it; the bound in force stays."""
        if update.revision <= self._settled_revision:
            return
        self._settled_revision = update.revision
        self._outcome = outcome
        self._reason = reason
        bound, tokens = update.bound.value, update.limit_tokens
        _log.warning("revision %d (%s %d) rejected: %s", update.revision, bound, tokens, reason)

    def on_step(self) -> None:
        """Go on with what is done in chunks; does nothing otherwise. Call once per scheduler step."""
        if self.draining:
            self._enforce()

    def _store(self, update: Update) -> None:
        """Let ``update`` be in force."""
        self._applied = update

    @abstractmethod
    def _enforce(self) -> None:
        """Do one chunk of what the bound in force asks for, and conclude; raises nothing that the engine's calls do."""

    def _conclude(self, outcome: Outcome, reason: str = "", *, draining: bool) -> None:
        """Note the end of an enforcement; a rejection stays visible until the next update."""
        self.draining = draining
        if self._settled_revision > self._applied.revision:
            return
        if self._settled_revision == 0 and outcome is Outcome.APPLIED:
            outcome = Outcome.STARTUP
        self._outcome = outcome
        self._reason = reason

    def _fail(self, error: Exception) -> None:
        """Conclude with what the engine raised; it is tried again at the next update or release, never by the clock."""
        self._conclude(Outcome.EVICTION_FAILED, f"{type(error).__name__}: {error}", draining=False)
        self._log_once(error)

    def _log_once(self, error: Exception) -> None:
        """Log ``error``, unless one of its kind was logged before: an eviction that keeps failing fills no log."""
        if type(error) in self._logged_errors:
            return
        self._logged_errors.add(type(error))
        _log.error(
            "eviction failed; the %s %d stays, and eviction is tried again at the next release",
            self._applied.bound.value,
            self._applied.limit_tokens,
            exc_info=error,
        )
