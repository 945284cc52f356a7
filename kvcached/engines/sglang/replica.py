"""One scheduler rank under control: what it tells the other ranks, what it applies, what it reports.

Every rank of a replica holds one :class:`ReplicaControl` and gets the same messages at the same scheduler iterations.
Whatever decides an eviction here is either in a message or in the prefix cache, which is equal on all ranks. Files are
read and written by the source rank alone.

All methods are for the scheduler's own thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.policy import RetentionPolicy
from kvcached.values import UNLIMITED, Outcome, Update

if TYPE_CHECKING:
    from kvcached.engines.sglang.cache import RadixPrefixCache
    from kvcached.engines.sglang.doorbell import Doorbell
    from kvcached.subscription import Subscription

CHUNK_TOKENS = 16384
"""How many tokens one iteration evicts at most; a tree evicts about 6,000 tokens in a millisecond (docs/sglang.md)."""

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

    def end_iteration(self, policy: RetentionPolicy) -> None:
        """Freshen the figures from time to time, and keep a scheduler awake that has evictions to go on with."""
        self._subscription.refresh(policy.report)
        if policy.draining and self._doorbell is not None:
            self._doorbell.ring()


class ReplicaControl:
    """The limit of one scheduler rank."""

    def __init__(self, cache: RadixPrefixCache, *, pipeline_parallel: bool, source: Source | None) -> None:
        """Govern ``cache`` from the arrival of :class:`Startup` on."""
        self.source = source
        self._cache = cache
        self._pipeline_parallel = pipeline_parallel
        self._policy: RetentionPolicy | None = None
        self._settled_idle_tokens = 0
        self._enforced_this_iteration = False

    def start(self, startup: Startup) -> None:
        """Begin with the limit that the source rank read from its environment."""
        limit = UNLIMITED if self._pipeline_parallel else startup.limit_tokens
        self._policy = RetentionPolicy(self._cache, limit, chunk_tokens=CHUNK_TOKENS)
        self._report()

    def apply(self, update: Update) -> None:
        """Take over an update where it stands in the order of requests, or refuse it."""
        policy = self._policy
        if policy is None:
            return
        if self._pipeline_parallel:
            policy.reject(update, Outcome.REJECTED_PIPELINE_PARALLEL, PIPELINE_PARALLEL_REASON)
        else:
            policy.update(update)
            self._note_enforcement()
        self._report()

    def on_release(self) -> None:
        """Keep to the limit after a request gave its tokens back."""
        policy = self._policy
        # A drop that is being worked off goes on once per iteration, not once per released request.
        if policy is None or policy.limit_tokens < 0 or policy.draining:
            return
        policy.on_release()
        self._note_enforcement()

    def end_iteration(self) -> None:
        """Go on with a big drop, or catch what became evictable without a release. Once per iteration, idle or not."""
        policy = self._policy
        if policy is None:
            return
        if policy.draining and not self._enforced_this_iteration:
            policy.on_step()
            self._note_enforcement()
        elif policy.limit_tokens >= 0 and self._cache.idle_tokens() != self._settled_idle_tokens:
            self._catch_up(policy)
        self._enforced_this_iteration = False
        if self.source is not None:
            self.source.end_iteration(policy)

    def _catch_up(self, policy: RetentionPolicy) -> None:
        """Enforce if idle tokens grew since the last enforcement.

        Growth, not excess, is the trigger: a failed eviction would otherwise be tried again at every iteration.
        """
        if not policy.draining and self._cache.idle_tokens() > self._settled_idle_tokens:
            policy.on_release()
            self._note_enforcement()
        else:
            self._settled_idle_tokens = self._cache.idle_tokens()

    def _note_enforcement(self) -> None:
        self._settled_idle_tokens = self._cache.idle_tokens()
        self._enforced_this_iteration = True
        if self.source is not None and self._policy is not None:
            self.source.after_enforcement(self._policy)

    def _report(self) -> None:
        if self.source is not None and self._policy is not None:
            self.source.acknowledge(self._policy)
