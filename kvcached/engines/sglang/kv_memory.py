"""The memory of one scheduler's KV pool, and everything that bounds the pool, put together.

What a rank can do is said twice: :class:`KvMemory` looks when the rank takes its place, so that it can tell the others;
:meth:`KvMemory.build` follows the source rank's first message, when the scheduler is complete.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from kvcached.capacity import CapacityPolicy
from kvcached.engines.sglang.free_slots import UnsupportedPoolError, explain_pool
from kvcached.engines.sglang.rank_messages import CAP_CHUNK_TOKENS, CHUNK_TOKENS
from kvcached.engines.sglang.slot_pool import SlotPool, explain_scheduler
from kvcached.engines.sglang.token_rows import find_obstacle, find_tensors, regions_of, row_bytes
from kvcached.memory.elastic import Elastic
from kvcached.memory.pool_memory import PoolMemory
from kvcached.memory.regions import PoolShape
from kvcached.memory.returning import LocalTransport
from kvcached.policy import RetentionPolicy
from kvcached.replica_policy import ReplicaPolicy
from kvcached.settings import STARTUP_CAP_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.sglang.cache import RadixPrefixCache
    from kvcached.engines.sglang.placement import Placement
    from kvcached.engines.sglang.rank_messages import Startup

_log = logging.getLogger(__name__)

PIPELINE_OBSTACLE = "pp_size > 1: pipeline stages do not act at the same step"


class KvMemory:
    """The KV pool of one rank. Scheduler thread only."""

    def __init__(self, scheduler: Any, placement: Placement) -> None:  # noqa: ANN401 - SGLang's scheduler
        """Look at the pool of ``scheduler``; reads ``/proc/self/smaps``, which takes milliseconds per GiB."""
        self._scheduler = scheduler
        self._ranks = placement.width
        self._is_source = placement.is_source
        unknown = explain_pool(scheduler)
        tensors = [] if unknown or placement.pp_size > 1 else find_tensors(scheduler)
        slots, page_tokens = (1, 1) if unknown else _size_of(scheduler.token_to_kv_pool_allocator)
        self._regions = regions_of(tensors, slots, page_tokens)
        self._token_bytes = row_bytes(tensors)
        self._shape = PoolShape(slots // page_tokens, self._token_bytes * page_tokens, len(self._regions), self._ranks)
        self.no_cap = unknown or explain_scheduler(scheduler)
        """Why the pool cannot be capped, ``""`` if it can."""
        self.obstacle = self.no_cap or find_obstacle(scheduler, self._regions, tensors)
        """Why its memory cannot be returned, ``""`` if it can."""
        if placement.pp_size > 1:
            self.obstacle = PIPELINE_OBSTACLE

    def build(
        self, startup: Startup, cache: RadixPrefixCache, limit_tokens: int, on_flush: Callable[[], None]
    ) -> ReplicaPolicy:
        """Return what bounds this rank from ``startup`` on.

        ``on_flush`` is called after SGLang emptied its pool: nothing is withheld any more then.
        """
        obstacle = self.obstacle or startup.obstacle
        transport = None if obstacle else LocalTransport(self._regions, self._ranks)
        memory = PoolMemory(self._shape, transport, obstacle)
        retention = RetentionPolicy(cache, limit_tokens, chunk_tokens=CHUNK_TOKENS)
        capacity = pool = None
        no_cap = self.no_cap or startup.no_cap
        if not no_cap:
            try:
                pool = SlotPool(self._scheduler, memory, cache.active_tokens, on_flush)
            except UnsupportedPoolError as error:
                no_cap = str(error)
            else:
                cache.withheld_tokens = pool.withheld_tokens
                capacity = CapacityPolicy(pool, retention, memory, startup.cap_tokens, chunk_tokens=CAP_CHUNK_TOKENS)
        if capacity is None and self._is_source:
            warn_unless_applied(STARTUP_CAP_VARIABLE, startup.cap_tokens, no_cap)
        token_bytes = self._token_bytes * self._ranks
        policy = ReplicaPolicy(retention, capacity, memory, token_bytes=token_bytes, no_cap_reason=no_cap)
        if pool is not None and startup.elastic_after_s is not None and memory.can_return:
            pool.reuse_newest_first()
            policy.become_elastic(Elastic(memory, pool, startup.elastic_after_s, time.monotonic()))
        return policy


def warn_unless_applied(variable: str, tokens: int, reason: str) -> None:
    """Say that the startup bound in ``variable`` is not applied, if there is one: this launch would hide it."""
    if tokens >= 0:
        _log.warning("%s=%d is not applied: %s", variable, tokens, reason)


def _size_of(allocator: Any) -> tuple[int, int]:  # noqa: ANN401 - SGLang's allocator
    """Return how many slots the pool's tensors have, the padding page included, and how many make a page."""
    page_tokens = int(allocator.page_size)
    return int(allocator.size) + page_tokens, page_tokens
