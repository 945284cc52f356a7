"""Joins what bounds one engine core's pool: its idle blocks, its limit, its cap, and the memory behind its blocks."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from kvcached.capacity import CapacityPolicy
from kvcached.engines.vllm.floor import floor_blocks
from kvcached.engines.vllm.idle_blocks import IdleBlocks
from kvcached.engines.vllm.prefix_cache import BlockPrefixCache, group_block_tokens
from kvcached.engines.vllm.withheld_blocks import WithheldBlocks
from kvcached.engines.vllm.worker_memory import WorkerMemory, WorkerTransport, look_at_workers
from kvcached.memory.elastic import Elastic
from kvcached.memory.pool_memory import PoolMemory
from kvcached.policy import RetentionPolicy
from kvcached.replica_policy import ReplicaPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.settings import Settings


def bound_pool(
    engine: Any,  # noqa: ANN401 - vLLM's EngineCore
    manager: Any,  # noqa: ANN401 - its KVCacheManager
    settings: Settings,
    on_fault: Callable[[Exception], None],
) -> BoundedPool:
    """Bound the pool of ``manager``. Asks the workers, so only with no step in flight.

    Raises what goes wrong, with nothing changed. ``on_fault`` gets what goes wrong later, in calls of vLLM's.
    """
    pool = manager.block_pool
    blocks = int(pool.num_gpu_blocks)
    workers = look_at_workers(engine, blocks)
    transport = WorkerTransport(engine, blocks)
    floor = floor_blocks(manager, engine.vllm_config)
    return BoundedPool(pool, group_block_tokens(manager), floor, workers, transport, settings, on_fault)


class BoundedPool:
    """One pool, and the policy that bounds it. Engine thread only."""

    def __init__(
        self,
        pool: Any,  # noqa: ANN401 - vLLM's BlockPool
        block_tokens: Sequence[int],
        floor: int,
        workers: WorkerMemory,
        transport: WorkerTransport,
        settings: Settings,
        on_fault: Callable[[Exception], None],
    ) -> None:
        """Follow ``pool``, whose groups have ``block_tokens``, and of which one request may need ``floor`` blocks."""
        with contextlib.ExitStack() as undo:
            self.idle = IdleBlocks(pool, on_fault)
            undo.callback(self.idle.detach)
            self.cache = BlockPrefixCache(self.idle, block_tokens)
            self.transport = transport
            self.memory = PoolMemory(workers.shape, transport, workers.obstacle)
            self.idle.follow_memory(self.memory)
            self.capped = WithheldBlocks(pool, self.idle, self.cache, self.memory, floor)
            self.policy = self._join(settings, self.cache.token_bytes(workers.shape.row_bytes_of_all_ranks))
            self.idle.follow_resets(self.policy)
            undo.pop_all()

    @property
    def retention(self) -> RetentionPolicy:
        """The limit alone."""
        return self.policy.retention

    @property
    def has_released(self) -> bool:
        """Whether blocks came or went since :meth:`note_released` in a way that concerns a bound."""
        idle = self.idle
        return idle.count != self._idle_blocks or (self._capacity.short and idle.used != self._used_blocks)

    def note_released(self) -> None:
        """Take the present counts as known."""
        self._idle_blocks = self.idle.count
        self._used_blocks = self.idle.used

    def detach(self) -> None:
        """Leave the pool to itself, whole."""
        try:
            self.capped.restore_all()
        finally:
            self.idle.detach()

    def _join(self, settings: Settings, token_bytes: int) -> ReplicaPolicy:
        self._idle_blocks = self._used_blocks = 0
        chunk_tokens = self.cache.chunk_tokens
        retention = RetentionPolicy(self.cache, settings.startup_limit_tokens, chunk_tokens=chunk_tokens)
        self._capacity = CapacityPolicy(
            self.capped, retention, self.memory, settings.startup_cap_tokens, chunk_tokens=chunk_tokens
        )
        policy = ReplicaPolicy(retention, self._capacity, self.memory, token_bytes=token_bytes)
        if settings.elastic_after_s is not None and self.memory.can_return:
            policy.become_elastic(Elastic(self.memory, self.capped, settings.elastic_after_s, time.monotonic()))
            self.idle.reuses_victims_first = True
        return policy
