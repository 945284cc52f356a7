"""The process-local limit of one replica and its enforcement on any prefix cache.

Every rank of a replica holds one :class:`RetentionPolicy` and calls it at the same steps with the same updates, so it
must decide the same everywhere: it reads no clock, no file and no environment, and a big drop goes in chunks that are
counts, never times.

All methods are for the scheduler's own thread.
"""

from __future__ import annotations

import logging
from typing import Protocol

from kvcached.values import UNLIMITED, Outcome, Report, Update, kept_tokens

DEFAULT_CHUNK_TOKENS = 65536
"""How many tokens one scheduler step evicts at most, so that a big drop never stalls serving.

Measured on 2 cores: vLLM's block pool drops 65,536 tokens in blocks of 16 within about 5 ms.
"""

_log = logging.getLogger(__name__)


class PrefixCache(Protocol):
    """What a prefix cache has to offer to be governed; all counts are in tokens and O(1).

    *Idle* tokens are cached and used by no running request; *active* ones are held by running requests.
    """

    @property
    def block_tokens(self) -> int:
        """The smallest amount the cache keeps, which never changes; a positive limit below it keeps one block."""

    def idle_tokens(self) -> int:
        """Return how many tokens are cached and used by no request."""

    def active_tokens(self) -> int:
        """Return how many tokens running requests hold; never evicted."""

    def capacity_tokens(self) -> int:
        """Return how many tokens fit into the cache in all."""

    def evict(self, tokens: int) -> int:
        """Evict at least ``tokens`` idle tokens, least recently used first, or as many as there are.

        Returns the number evicted. May raise: the policy counts it and serving goes on.
        """


class RetentionPolicy:
    """How many idle tokens this process may retain, and the steps that keep it there."""

    def __init__(
        self,
        cache: PrefixCache,
        startup_limit_tokens: int,
        *,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    ) -> None:
        """Govern ``cache``, retaining at most ``startup_limit_tokens`` until the first update."""
        self.draining = False
        """Whether a drop is still in progress, in chunks: the engine has to keep stepping, idle or not."""
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._apply(Update(0, max(startup_limit_tokens, UNLIMITED)))
        self._settled_revision = 0
        self._outcome = Outcome.STARTUP
        self._reason = ""
        self._evicted_tokens = 0
        self._eviction_errors = 0
        self._logged_errors: set[type[BaseException]] = set()

    @property
    def limit_tokens(self) -> int:
        """The limit in force, in tokens; -1 is unlimited."""
        return self._applied.limit_tokens

    @property
    def settled_revision(self) -> int:
        """The newest revision that was applied or rejected here."""
        return self._settled_revision

    def update(self, update: Update) -> None:
        """Take ``update`` over: store it first, then evict the first chunk of the excess.

        A revision that is not newer than the settled one is ignored, so delivering an update twice does no harm.
        """
        if update.revision <= self._settled_revision:
            return
        self._settled_revision = update.revision
        self._apply(update)
        self._reason = ""
        self._enforce()

    def _apply(self, update: Update) -> None:
        self._applied = update
        self._kept_tokens = kept_tokens(update.limit_tokens, self._cache.block_tokens)  # once, not at each release

    def reject(self, update: Update, outcome: Outcome, reason: str) -> None:
        """Settle ``update`` without applying it; the limit in force stays."""
        if update.revision <= self._settled_revision:
            return
        self._settled_revision = update.revision
        self._outcome = outcome
        self._reason = reason
        _log.warning("revision %d (limit %d) rejected: %s", update.revision, update.limit_tokens, reason)

    def on_release(self) -> None:
        """Keep to the limit after a request released its blocks."""
        self._enforce()

    def on_step(self) -> None:
        """Continue a drop that is in progress; does nothing otherwise. Call once per scheduler step."""
        if self.draining:
            self._enforce()

    def report(self) -> Report:
        """Return the limit in force and the cache's figures as they are now."""
        cache = self._cache
        return Report(
            applied=self._applied,
            settled_revision=self._settled_revision,
            outcome=self._outcome,
            reason=self._reason,
            idle_tokens=cache.idle_tokens(),
            active_tokens=cache.active_tokens(),
            capacity_tokens=cache.capacity_tokens(),
            evicted_tokens=self._evicted_tokens,
            eviction_errors=self._eviction_errors,
        )

    def _enforce(self) -> None:
        """Evict one chunk of the excess, and note what came of it."""
        excess = self._excess_tokens()
        if excess <= 0:
            self._conclude(Outcome.APPLIED, draining=False)
            return
        try:
            evicted = self._cache.evict(min(excess, self._chunk_tokens))
        except Exception as error:  # noqa: BLE001 - the engine's eviction path may raise anything; serving must go on
            self._count_failure(error)
            return
        self._evicted_tokens += evicted
        if self._excess_tokens() <= 0:
            self._conclude(Outcome.APPLIED, draining=False)
        elif evicted > 0:
            self._conclude(Outcome.APPLYING, draining=True)
        else:
            self._conclude(Outcome.HELD, draining=False)

    def _excess_tokens(self) -> int:
        """Return how many idle tokens are above the limit; negative when there is room."""
        kept = self._kept_tokens
        return 0 if kept < 0 else self._cache.idle_tokens() - kept

    def _conclude(self, outcome: Outcome, *, draining: bool) -> None:
        """Note the end of an enforcement; a standing rejection stays visible until the next update."""
        self.draining = draining
        if self._settled_revision > self._applied.revision:
            return
        if self._settled_revision == 0 and outcome is Outcome.APPLIED:
            outcome = Outcome.STARTUP
        self._outcome = outcome
        self._reason = ""

    def _count_failure(self, error: Exception) -> None:
        """Count a failed eviction; it is tried again at the next update or release, never by the clock."""
        self.draining = False
        self._eviction_errors += 1
        if self._settled_revision == self._applied.revision:
            self._outcome = Outcome.EVICTION_FAILED
            self._reason = f"{type(error).__name__}: {error}"
        if type(error) not in self._logged_errors:
            self._logged_errors.add(type(error))
            _log.exception(
                "eviction failed; the limit %d stays, and eviction is tried again at the next release",
                self.limit_tokens,
            )
