"""One scheduler rank under control: what it tells the other ranks, what it applies, what it reports.

Every rank of a replica holds one :class:`ReplicaControl` and gets the same messages at the same scheduler iterations.
Whatever decides an eviction here is either in a message or in the prefix cache, which is equal on all ranks. Files are
read and written by the source rank alone.

All methods are for the scheduler's own thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.policy import RetentionPolicy
from kvcached.subscription import REFRESH_S
from kvcached.values import UNLIMITED, Outcome, Update

if TYPE_CHECKING:
    from kvcached.engines.sglang.cache import RadixPrefixCache
    from kvcached.engines.sglang.doorbell import Doorbell
    from kvcached.registration import SlotPlace
    from kvcached.subscription import Subscription

CHUNK_TOKENS = 8192
"""How many tokens one iteration evicts at most: about 2.5 ms on two slow cores for leaves of 100 tokens."""

PIPELINE_PARALLEL_REASON = (
    "pp_size > 1: the pipeline stages evict each on its own, so the limit of this engine cannot be changed at run time"
)

_OPEN_OUTCOMES = frozenset({Outcome.APPLYING, Outcome.HELD, Outcome.EVICTION_FAILED})


@dataclass(frozen=True, slots=True)
class Startup:
    """The first message from a source rank to its replica: the limit to start with.

    It travels, though every rank has an environment of its own, because that of another node may differ.
    """

    limit_tokens: int


class Source:
    """The source rank's door to the outside: what is published comes in, what became of it goes out."""

    def __init__(self, startup: Startup, subscription: Subscription, doorbell: Doorbell | None) -> None:
        """Announce ``startup`` first, then whatever ``subscription`` brings."""
        self._subscription = subscription
        self._doorbell = doorbell
        self._startup: Startup | None = startup
        self._announced_revision = 0
        self._open = False
        self.next_refresh = 0.0
        """When the reported figures are due again, on the clock of ``time.monotonic``."""

    def place(self) -> SlotPlace | None:
        """Return where in the ledgers this replica stands now, if it does."""
        return self._subscription.place()

    def collect(self) -> list[Startup | Update]:
        """Return what the replica has to be told now; nearly always nothing. Call once per iteration."""
        if self._doorbell is not None:
            self._doorbell.answer()
        update = self._subscription.poll()
        if update is None and self._startup is None:
            return []
        news: list[Startup | Update] = []
        if self._startup is not None:
            news.append(self._startup)
            self._startup = None
        # Once per revision: the engine may hold a message back for some iterations, for instance behind a pause.
        if update is not None and update.revision > self._announced_revision:
            self._announced_revision = update.revision
            news.append(update)
        return news

    def acknowledge(self, policy: RetentionPolicy) -> None:
        """Report how things stand, now."""
        report = policy.report()
        self._open = report.outcome in _OPEN_OUTCOMES
        self._subscription.acknowledge(report)

    def after_enforcement(self, policy: RetentionPolicy) -> None:
        """Report at once if the newest publication was still waiting for evictions."""
        if self._open:
            self.acknowledge(policy)

    def refresh(self, policy: RetentionPolicy) -> None:
        """Freshen the reported figures, and keep a scheduler awake that has evictions to go on with."""
        self.next_refresh = time.monotonic() + REFRESH_S
        self._subscription.refresh(policy.report)
        if policy.draining and self._doorbell is not None:
            self._doorbell.ring()


class ReplicaControl:
    """The limit of one scheduler rank."""

    def __init__(self, cache: RadixPrefixCache, *, pipeline_parallel: bool, source: Source | None) -> None:
        """Govern ``cache`` from the arrival of :class:`Startup` on."""
        self._source = source
        self._cache = cache
        self._idle_tokens = cache.idle_tokens
        self._pipeline_parallel = pipeline_parallel
        self._policy: RetentionPolicy | None = None
        self._limited = False
        self._settled_idle_tokens = 0
        self._enforced_this_iteration = False

    @property
    def limit_tokens(self) -> int | None:
        """The limit in force, in tokens, -1 for none; None before it began."""
        return None if self._policy is None else self._policy.limit_tokens

    def start(self, startup: Startup) -> None:
        """Begin with the limit that the source rank read from its environment."""
        limit = UNLIMITED if self._pipeline_parallel else startup.limit_tokens
        policy = self._policy = RetentionPolicy(self._cache, limit, chunk_tokens=CHUNK_TOKENS)
        self._limited = policy.limit_tokens >= 0
        self._report(policy)

    def apply(self, update: Update) -> None:
        """Take over an update where it stands in the order of requests, or refuse it."""
        policy = self._policy
        if policy is None:
            return
        if self._pipeline_parallel:
            policy.reject(update, Outcome.REJECTED_PIPELINE_PARALLEL, PIPELINE_PARALLEL_REASON)
        else:
            policy.update(update)
            self._limited = policy.limit_tokens >= 0
            self._note_enforcement(policy)
        self._report(policy)

    def on_release(self) -> None:
        """Keep to the limit after a request gave its tokens back."""
        policy = self._policy
        # A drop that is being worked off goes on once per iteration, not once per released request.
        if policy is None or not self._limited or policy.draining:
            return
        policy.on_release()
        self._note_enforcement(policy)

    def end_iteration(self) -> None:
        """Go on with a big drop, or catch what became idle without a release. Once per iteration, idle or not; hot."""
        policy = self._policy
        if policy is None:
            return
        if self._limited and (policy.draining or self._idle_tokens() != self._settled_idle_tokens):
            self._catch_up(policy)
        source = self._source
        if source is not None and (policy.draining or time.monotonic() >= source.next_refresh):
            source.refresh(policy)

    def _catch_up(self, policy: RetentionPolicy) -> None:
        """Evict the next chunk of a big drop, or enforce if idle tokens grew since the last enforcement.

        Growth, not excess, is the trigger: a failed eviction would otherwise be tried again at every iteration.
        """
        if policy.draining:
            if not self._enforced_this_iteration:
                policy.on_step()
                self._note_enforcement(policy)
        elif self._idle_tokens() > self._settled_idle_tokens:
            policy.on_release()
            self._note_enforcement(policy)
        self._settled_idle_tokens = self._idle_tokens()
        self._enforced_this_iteration = False

    def _note_enforcement(self, policy: RetentionPolicy) -> None:
        self._settled_idle_tokens = self._idle_tokens()
        self._enforced_this_iteration = True
        if self._source is not None:
            self._source.after_enforcement(policy)

    def _report(self, policy: RetentionPolicy) -> None:
        if self._source is not None:
            self._source.acknowledge(policy)
