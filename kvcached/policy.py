"""The process-local limit of one replica and its enforcement on any prefix cache.

Every rank of a replica holds one :class:`RetentionPolicy` and calls it at the same steps with the same updates, so it
must decide the same everywhere: it reads no clock, no file and no environment, and a big drop goes in chunks that are
counts, never times.

All methods are for the scheduler's own thread.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from kvcached.bound_policy import BoundPolicy
from kvcached.guards import call_guarded
from kvcached.values import UNLIMITED, Outcome, Report, Update, kept_tokens

DEFAULT_CHUNK_TOKENS = 65536
"""How many tokens one scheduler step evicts at most, so that a big drop never stalls serving.

Measured on 2 cores: vLLM's block pool drops 65,536 tokens in blocks of 16 within about 5 ms.
"""


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


class RetentionPolicy(BoundPolicy):
    """How many idle tokens this process may retain, and the steps that keep it there."""

    def __init__(
        self,
        cache: PrefixCache,
        startup_limit_tokens: int,
        *,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    ) -> None:
        """Govern ``cache``, retaining at most ``startup_limit_tokens`` until the first update."""
        startup = Update(0, max(startup_limit_tokens, UNLIMITED))
        super().__init__(startup)
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._evicted_tokens = 0
        self._eviction_errors = 0
        self._store(startup)

    @property
    def limit_tokens(self) -> int:
        """The limit in force, in tokens; -1 is unlimited."""
        return self._applied.limit_tokens

    def on_release(self) -> None:
        """Keep to the limit after a request released its blocks."""
        self._enforce()

    def make_room(self, tokens: int) -> int:
        """Evict ``tokens`` idle tokens for the cap, or as many as there are, and return how many.

        They are counted with the others. What the cache raises is counted, logged once per kind, and raised again.
        """
        evicted = call_guarded(self._fail_to_make_room, self._cache.evict, tokens)
        self._evicted_tokens += evicted
        return evicted

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

    def _store(self, update: Update) -> None:
        super()._store(update)
        self._kept_tokens = kept_tokens(update.limit_tokens, self._cache.block_tokens)  # once, not at each release

    def _enforce(self) -> None:
        """Evict one chunk of the excess, and note what came of it."""
        excess = self._excess_tokens()
        if excess <= 0:
            self._conclude(Outcome.APPLIED, draining=False)
            return
        evicted = call_guarded(self._fail, self._cache.evict, min(excess, self._chunk_tokens))
        if evicted is None:
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

    def _fail(self, error: Exception) -> None:
        self._eviction_errors += 1
        super()._fail(error)

    def _fail_to_make_room(self, error: Exception) -> NoReturn:
        """Count it; the outcome is the cap's to report, and the limit's stays."""
        self._eviction_errors += 1
        self._log_once(error)
        raise error
