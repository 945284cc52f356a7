"""The rig's block pool as the cap and elastic memory see it.

Fulfils ``kvcached.capacity.BlockPool`` and ``kvcached.memory.elastic.FreeRows``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached.memory.pool_memory import PoolMemory
    from kvcached.rig.block_cache import BlockCache
    from kvcached.rig.scheduler import Scheduler


class RigPool:
    """Takes blocks out of a pool, and offers their memory for return."""

    def __init__(self, cache: BlockCache, scheduler: Scheduler, memory: PoolMemory, longest_tokens: int) -> None:
        """Withhold blocks of ``cache`` that ``scheduler`` has not promised to a request.

        ``longest_tokens`` is the length of the longest request that is accepted.
        """
        self._cache = cache
        self._scheduler = scheduler
        self._memory = memory
        self._block_tokens = cache.block_tokens
        self._floor_tokens = -(-longest_tokens // cache.block_tokens) * cache.block_tokens
        self._withheld: list[int] = []

    def pool_tokens(self) -> int:
        """Return how many tokens fit into the pool, withheld blocks included."""
        return self._cache.capacity_tokens()

    def floor_tokens(self) -> int:
        """Return what the longest request needs, in whole blocks."""
        return self._floor_tokens

    def free_tokens(self) -> int:
        """Return the tokens of free blocks that running requests can do without; they may take idle ones instead."""
        return self._spare_blocks() * self._block_tokens

    def withheld_tokens(self) -> int:
        """Return how many tokens of blocks are withheld."""
        return len(self._withheld) * self._block_tokens

    def withhold(self, tokens: int) -> int:
        """Take free blocks of at least ``tokens`` tokens out of the pool, or all that can be spared."""
        blocks = self._cache.withhold(min(-(-tokens // self._block_tokens), self._spare_blocks()))
        self._withheld += blocks
        self._memory.offer(blocks)
        return len(blocks) * self._block_tokens

    def restore(self, tokens: int) -> int:
        """Put withheld blocks of at most ``tokens`` tokens back, those first that were withheld last."""
        count = min(tokens // self._block_tokens, len(self._withheld))
        kept = len(self._withheld) - count
        self._cache.restore(self._withheld[kept:])
        del self._withheld[kept:]
        return count * self._block_tokens

    def free_rows(self) -> int:
        """Return how many blocks are free."""
        return self._cache.free_blocks()

    def active_rows(self) -> int:
        """Return how many blocks requests hold."""
        return self._cache.active_tokens() // self._block_tokens

    def withheld_rows(self) -> int:
        """Return how many blocks are withheld."""
        return len(self._withheld)

    def rows_after(self, keep: int) -> list[int]:
        """Return the free blocks but the ``keep`` that are allocated first."""
        return self._cache.free_after(keep)

    def _spare_blocks(self) -> int:
        """Return how many free blocks can go: running requests were promised a number of free or idle ones."""
        unpromised = self._cache.available_blocks() - self._scheduler.reserved_blocks
        return max(0, min(self._cache.free_blocks(), unpromised))
