"""One scheduler rank under control: what it tells the other ranks, what it applies, what it reports.

Every rank of a replica holds one :class:`ReplicaControl` and gets the same messages at the same scheduler iterations.
Whatever decides an eviction here is either in a message or in the prefix cache, which is equal on all ranks. Files are
read and written by the source rank alone.

All methods are for the scheduler's own thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvcached.engines.sglang.agreement import PATIENCE_S
from kvcached.engines.sglang.ungoverned_scheduler import UNGOVERNED
from kvcached.ledger.subscription import REFRESH_S
from kvcached.policy import RetentionPolicy
from kvcached.values import UNLIMITED, Outcome, Update, unsupported_report

if TYPE_CHECKING:
    from kvcached.engines.sglang.agreement import RankAgreement
    from kvcached.engines.sglang.cache import RadixPrefixCache
    from kvcached.engines.sglang.doorbell import Doorbell
    from kvcached.ledger.registration import SlotPlace
    from kvcached.ledger.subscription import Subscription

CHUNK_TOKENS = 8192
"""How many tokens one iteration evicts at most: about 2.5 ms on two slow cores for leaves of 100 tokens."""

PIPELINE_PARALLEL_REASON = (
    "pp_size > 1: pipeline stages evict independently, so the limit of this engine cannot be changed at run time"
)

EVICTION_RULES = 1
"""Raise it when ranks of this and of the former version would evict other tokens for the same messages."""

_log = logging.getLogger(__name__)

_OPEN_OUTCOMES = frozenset({Outcome.APPLYING, Outcome.HELD, Outcome.EVICTION_FAILED})


@dataclass(frozen=True, slots=True)
class Startup:
    """The first message from a source rank to its replica: the limit to start with.

    It travels, though every rank has an environment of its own, because that of another node may differ.
    """

    limit_tokens: int


def dialect() -> str:
    """Return what must be the same on all ranks of a replica: the shape of the messages and what follows from them."""
    shapes = [
        (kind.__module__, kind.__qualname__, [field.name for field in fields(kind)]) for kind in (Startup, Update)
    ]
    return repr((shapes, CHUNK_TOKENS, EVICTION_RULES))


class Source:
    """The source rank's door to the outside: what is published comes in, what became of it goes out.

    Nothing is announced before all ranks agreed that they can follow. Without agreement, whatever is published is
    refused with the reason.
    """

    def __init__(
        self, startup: Startup, subscription: Subscription, doorbell: Doorbell | None, agreement: RankAgreement
    ) -> None:
        """Announce ``startup`` first, then whatever ``subscription`` brings."""
        self._subscription = subscription
        self._doorbell = doorbell
        self._agreement = agreement
        self._patient_until = time.monotonic() + PATIENCE_S
        self._refusal = ""
        self._startup: Startup | None = startup
        self._announced_revision = 0
        self._open = False
        self.next_refresh = 0.0
        """When the reported figures are due again, on the clock of ``time.monotonic``."""

    @property
    def began(self) -> bool:
        """Whether the replica was told its startup limit."""
        return self._startup is None

    def place(self) -> SlotPlace | None:
        """Return the replica's slots in the ledgers, or None without a registration."""
        return self._subscription.place()

    def close(self) -> None:
        """Release the slots."""
        self._subscription.close()

    def collect(self) -> list[Startup | Update]:
        """Return what the replica has to be told now; nearly always nothing. Call once per iteration."""
        if self._doorbell is not None:
            self._doorbell.answer()
        if self._startup is not None:
            return self._begin(self._startup)
        update = self._subscription.poll()
        # Once per revision: the engine may hold a message back for some iterations, for instance behind a pause.
        if update is None or update.revision <= self._announced_revision:
            return []
        self._announced_revision = update.revision
        return [update]

    def note_served(self) -> None:
        """Take note that all ranks have served a request: who did not say by now that it can follow never will."""
        if self._startup is not None and not self._refusal and not self._agreement.is_reached(at_once=True):
            self._give_up()

    def _begin(self, startup: Startup) -> list[Startup | Update]:
        if self._refusal:
            update = self._subscription.poll()
            if update is not None:
                self._subscription.acknowledge(unsupported_report(self._refusal, update.revision))
        elif self._agreement.is_reached():
            self._startup = None
            return [startup, *self.collect()]
        elif self._agreement.is_refused or time.monotonic() >= self._patient_until:
            self._give_up()
        return []

    def _give_up(self) -> None:
        self._refusal = self._agreement.explain()
        _log.error(UNGOVERNED, self._refusal)
        self._subscription.acknowledge(unsupported_report(self._refusal))

    def acknowledge(self, policy: RetentionPolicy) -> None:
        """Report the current state."""
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

    def __init__(
        self, cache: RadixPrefixCache, *, pipeline_parallel: bool, source: Source | None, agreement: RankAgreement
    ) -> None:
        """Govern ``cache`` from the arrival of :class:`Startup` on."""
        self._source = source
        self._agreement = agreement
        self._complains_at = time.monotonic() + PATIENCE_S
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
        """Apply an update at its place in the order of requests, or reject it."""
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
        # A drop in progress continues once per iteration, not once per released request.
        if policy is None or not self._limited or policy.draining:
            return
        policy.on_release()
        self._note_enforcement(policy)

    def end_iteration(self) -> None:
        """Go on with a big drop, or catch what became idle without a release. Once per iteration, idle or not; hot."""
        policy = self._policy
        if policy is None:
            self._await_startup()
            return
        if self._limited and (policy.draining or self._idle_tokens() != self._settled_idle_tokens):
            self._catch_up(policy)
        source = self._source
        if source is not None and (policy.draining or time.monotonic() >= source.next_refresh):
            source.refresh(policy)

    def _await_startup(self) -> None:
        """Say once that this rank waits in vain; a source rank says so itself, and publishers learn it from there."""
        now = time.monotonic()
        if self._source is None and now >= self._complains_at:
            self._complains_at = now + PATIENCE_S
            if not self._agreement.is_reached(at_once=True):
                self._complains_at = float("inf")
                _log.error(UNGOVERNED, self._agreement.explain())

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
