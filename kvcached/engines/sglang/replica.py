"""One scheduler rank under control: what it applies and what it reports.

Every rank of a replica holds one :class:`ReplicaControl` and gets the same messages at the same scheduler iterations.
Whatever decides an eviction here, or which slots are withheld, is either in a message or in the prefix cache and its
pool, which are equal on all ranks. Files are read and written by the source rank alone.

All methods are for the scheduler's own thread.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvcached.engines.sglang.agreement import PATIENCE_S
from kvcached.engines.sglang.ungoverned_scheduler import UNGOVERNED
from kvcached.memory.figures import RETURNS
from kvcached.values import UNLIMITED, Outcome

if TYPE_CHECKING:
    from kvcached.engines.sglang.agreement import RankAgreement
    from kvcached.engines.sglang.cache import RadixPrefixCache
    from kvcached.engines.sglang.kv_memory import KvMemory
    from kvcached.engines.sglang.rank_messages import Startup
    from kvcached.engines.sglang.replica_source import Source
    from kvcached.replica_policy import ReplicaPolicy
    from kvcached.values import Update

PIPELINE_PARALLEL_REASON = (
    "pp_size > 1: pipeline stages evict independently, so the {} of this engine cannot be changed at run time"
)

_log = logging.getLogger(__name__)


class ReplicaControl:
    """The limit and the cap of one scheduler rank."""

    def __init__(
        self,
        cache: RadixPrefixCache,
        memory: KvMemory,
        *,
        pipeline_parallel: bool,
        source: Source | None,
        agreement: RankAgreement,
    ) -> None:
        """Govern ``cache`` and its pool from the arrival of :class:`Startup` on."""
        self._source = source
        self._agreement = agreement
        self._complains_at = time.monotonic() + PATIENCE_S
        self._cache = cache
        self._memory = memory
        self._idle_tokens = cache.idle_tokens
        self._pipeline_parallel = pipeline_parallel
        self._policy: ReplicaPolicy | None = None
        self._bounded = False
        self._flushed = False
        self._released = False
        self._settled_idle_tokens = 0
        self._enforced_this_iteration = False
        self._returns = RETURNS
        """What the other ranks believe of this one."""

    @property
    def limit_tokens(self) -> int | None:
        """The limit in force, in tokens, -1 for none; None before it began."""
        return None if self._policy is None else self._policy.limit_tokens

    def start(self, startup: Startup) -> None:
        """Begin with what the source rank read from its environment."""
        limit = UNLIMITED if self._pipeline_parallel else startup.limit_tokens
        policy = self._policy = self._memory.build(startup, self._cache, limit, self._note_flush)
        self._returns = policy.returns
        self._note_bounds(policy)
        self._report(policy)

    def apply(self, update: Update) -> None:
        """Apply an update at its place in the order of requests, or reject it."""
        policy = self._policy
        if policy is None:
            return
        if self._pipeline_parallel:
            reason = PIPELINE_PARALLEL_REASON.format(update.bound.value)
            policy.reject(update, Outcome.REJECTED_PIPELINE_PARALLEL, reason)
        else:
            policy.update(update)
            self._note_bounds(policy)
            self._note_enforcement(policy)
        self._report(policy)

    def on_release(self) -> None:
        """Keep to the limit after a request gave its tokens back; the cap takes them at the end of the iteration."""
        policy = self._policy
        if policy is None or not self._bounded:
            return
        self._released = True
        # A drop in progress continues once per iteration, not once per released request.
        if policy.limit_tokens >= 0 and not policy.retention.draining:
            policy.keep_limit()
            self._note_enforcement(policy)

    def end_iteration(self) -> None:
        """Continue what is done in pieces, or catch what became idle without a release. Idle or not; hot."""
        policy = self._policy
        if policy is None:
            self._await_startup()
            return
        if self._bounded and (self._released or self._idle_tokens() != self._settled_idle_tokens):
            self._keep(policy)
        if policy.pending and not self._enforced_this_iteration:
            self._continue(policy)
        if self._enforced_this_iteration:
            self._enforced_this_iteration = False
        source = self._source
        if source is not None and (time.monotonic() >= source.next_refresh or (policy.pending and policy.draining)):
            source.refresh(policy)

    def _await_startup(self) -> None:
        """Say once that this rank waits in vain; a source rank says so itself, and publishers learn it from there."""
        now = time.monotonic()
        if self._source is None and now >= self._complains_at:
            self._complains_at = now + PATIENCE_S
            if not self._agreement.is_reached(at_once=True):
                self._complains_at = float("inf")
                _log.error(UNGOVERNED, self._agreement.explain())

    def _keep(self, policy: ReplicaPolicy) -> None:
        """Enforce both bounds on what became idle or free.

        Growth, not excess, is the trigger: a failed eviction would otherwise be tried again at every iteration.
        """
        if self._flushed:
            self._flushed = False
            policy.resume()
            self._note_enforcement(policy)
        idle = self._idle_tokens()
        if idle > self._settled_idle_tokens and not policy.retention.draining:
            policy.keep_limit()
            self._note_enforcement(policy)
            self._released = True
        self._settled_idle_tokens = self._idle_tokens()
        if self._released:
            self._released = False
            policy.keep_cap()

    def _continue(self, policy: ReplicaPolicy) -> None:
        """Do the next piece of a big drop or of the return of memory."""
        draining = policy.draining
        policy.on_step()
        if not draining:
            return
        self._note_enforcement(policy)
        if self._source is None and policy.returns != self._returns:
            self._returns = policy.returns
            self._agreement.declare_shortfall(self._returns)

    def _note_flush(self) -> None:
        """Remember that SGLang emptied its pool, and put what was withheld back into it."""
        self._flushed = self._released = True

    def _note_bounds(self, policy: ReplicaPolicy) -> None:
        self._bounded = policy.limit_tokens >= 0 or policy.cap_tokens >= 0

    def _note_enforcement(self, policy: ReplicaPolicy) -> None:
        self._settled_idle_tokens = self._idle_tokens()
        self._enforced_this_iteration = True
        if self._source is not None:
            self._source.after_enforcement(policy)

    def _report(self, policy: ReplicaPolicy) -> None:
        if self._source is not None:
            self._source.acknowledge(policy)
