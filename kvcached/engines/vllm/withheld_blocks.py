"""Free blocks taken out of one vLLM pool, by the pool's own ``get_new_blocks`` and ``free_blocks``.

A withheld block is to vLLM one that some request holds: it is no candidate for anything, and its hash is gone.

Everything here runs on the engine's own thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.engines.vllm.idle_blocks import IdleBlocks
    from kvcached.engines.vllm.pool_block import Block
    from kvcached.engines.vllm.prefix_cache import BlockPrefixCache
    from kvcached.memory.pool_memory import PoolMemory


class WithheldBlocks:
    """One pool of which blocks are withheld.

    Fulfils ``kvcached.capacity.BlockPool`` and ``kvcached.memory.elastic.FreeRows``.
    """

    def __init__(
        self,
        pool: Any,  # noqa: ANN401 - vLLM's BlockPool
        idle: IdleBlocks,
        cache: BlockPrefixCache,
        memory: PoolMemory,
        floor_blocks: int,
    ) -> None:
        """Withhold blocks of ``pool``; ``memory`` hears of those that are withheld."""
        self._pool = pool
        self._idle = idle
        self._cache = cache
        self._memory = memory
        self._floor_blocks = floor_blocks
        self._withheld: list[Block] = []

    def pool_tokens(self) -> int:
        """Return the tokens' worth of all blocks that requests could have without a cap."""
        return self._cache.capacity_tokens()

    def floor_tokens(self) -> int:
        """Return the tokens' worth of what one request of the greatest length needs."""
        return self._cache.tokens_up(min(self._floor_blocks, self._idle.total))

    def free_tokens(self) -> int:
        """Return the tokens' worth of free blocks that cache nothing, rounded down."""
        return self._cache.tokens_down(self._idle.uncached)

    def withheld_tokens(self) -> int:
        """Return the tokens' worth of the withheld blocks, rounded down."""
        return self._cache.tokens_down(len(self._withheld))

    def withhold(self, tokens: int) -> int:
        """Take uncached free blocks that are worth ``tokens`` out of the pool, and let their memory be returned."""
        before = self.withheld_tokens()
        count = min(self._cache.blocks_up(tokens), self._idle.uncached)
        if count > 0:
            with self._idle.own_calls():
                blocks = self._pool.get_new_blocks(count)
            self._withheld += blocks
            self._idle.withheld = len(self._withheld)
            self._memory.offer(block.block_id for block in blocks)
        return self.withheld_tokens() - before

    def restore(self, tokens: int) -> int:
        """Give withheld blocks that are worth at most ``tokens`` back to the pool, the last ones first."""
        before = self.withheld_tokens()
        count = min(self._cache.blocks_down(tokens), len(self._withheld))
        self._restore(count)
        return before - self.withheld_tokens()

    def restore_all(self) -> None:
        """Give all withheld blocks back."""
        self._restore(len(self._withheld))

    def free_rows(self) -> int:
        """Return how many free blocks cache nothing."""
        return self._idle.uncached

    def active_rows(self) -> int:
        """Return how many blocks requests hold."""
        return self._idle.used

    def withheld_rows(self) -> int:
        """Return how many blocks are withheld."""
        return len(self._withheld)

    def rows_after(self, keep: int) -> Iterator[int]:
        """Yield the ids of the free blocks that cache nothing but the ``keep`` that are handed out first."""
        kept = self._idle.first_uncached(keep)
        if kept is None:
            return
        for block in self._pool.blocks:
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null and block.block_id not in kept:
                yield block.block_id

    def _restore(self, count: int) -> None:
        if count > 0:
            keep = len(self._withheld) - count
            blocks, self._withheld = self._withheld[keep:], self._withheld[:keep]
            self._idle.withheld = len(self._withheld)
            self._pool.free_blocks(blocks)
