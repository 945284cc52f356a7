"""How many blocks of vLLM's pool are cached and used by nobody, in O(1) and with no work per block.

The number of cached blocks in the free queue is the queue's length, which vLLM counts itself, less the length of its
first part and the holes in its second; ``free_queue.py`` tells what these are. The last block of the first part is the
*boundary*: the next victim is behind it. An eviction moves the boundary on and absorbs the holes that it passes.

Everything here runs on the engine's own thread.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from kvcached.engines.vllm.free_queue import FreeQueue
from kvcached.engines.vllm.pool_block import NO_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcached.engines.vllm.pool_block import Block, Cap, TakenBlocks

_log = logging.getLogger(__name__)

LOOK_UP_BLOCKS = 4096
"""After how many blocks a check looks whether it is in the way: about a third of a millisecond."""


class CountMismatchError(RuntimeError):
    """The count of idle blocks is not what a walk over the free queue finds."""


class IdleBlocks:
    """The idle cached blocks of one ``BlockPool``: their number, and their eviction in least recently used order."""

    __slots__ = ("_evict_blocks", "_free", "_pool", "_queue", "reuses_victims_first", "withheld")

    def __init__(self, pool: Any, on_fault: Callable[[Exception], None] | None = None) -> None:  # noqa: ANN401
        """Count the blocks of vLLM's ``BlockPool`` once, and follow every change from here on.

        ``on_fault`` gets an exception of our own bookkeeping, after which nothing is followed and the count is void;
        without it, such an exception comes out of vLLM's call.
        """
        self._pool = pool
        self._queue = pool.free_block_queue
        self._free = FreeQueue(pool, on_fault or _raise)
        self._evict_blocks = self._free.stock_evict_blocks
        self.withheld = 0
        """How many blocks the cap withholds: vLLM counts them as used, and no request holds them."""
        self.reuses_victims_first = False
        """Whether evicted blocks are the next to be handed out, and not the last: their memory need not come back."""

    @property
    def count(self) -> int:
        """How many cached blocks are in the free queue."""
        parts = self._free
        front = parts.front
        free: int = self._queue.num_free_blocks
        return (free - front if front > 0 else free) - len(parts.holes)

    @property
    def used(self) -> int:
        """How many blocks requests hold (the pool's null block is not among them)."""
        used: int = self._pool.num_gpu_blocks - 1 - self._queue.num_free_blocks - self.withheld
        return used

    @property
    def uncached(self) -> int:
        """How many free blocks cache nothing and are handed out before any cached one; holes are not among them."""
        return max(self._free.front, 0)

    @property
    def total(self) -> int:
        """How many blocks requests can have in all."""
        total: int = self._pool.num_gpu_blocks - 1
        return total

    def follow_memory(self, memory: TakenBlocks) -> None:
        """Tell ``memory`` from here on which blocks are handed out."""
        self._free.memory = memory

    def follow_resets(self, cap: Cap) -> None:
        """Lift ``cap`` from here on around each of vLLM's resets of the prefix cache."""
        self._free.cap = cap

    @contextlib.contextmanager
    def own_calls(self) -> Iterator[None]:
        """Take blocks out of the queue that nobody will write to: the memory does not hear of them."""
        memory, self._free.memory = self._free.memory, NO_MEMORY
        try:
            yield
        finally:
            self._free.memory = memory

    def first_uncached(self, count: int) -> set[int] | None:
        """Return the ids of the first ``count`` free blocks and of all holes; None if blocks are ever adopted again.

        An unpinned block is still read while it is free, so it must keep what it holds.
        """
        if self._free.follows_remove:
            return None
        found = set(self._free.holes)
        block = self._queue.fake_free_list_head.next_free_block
        for _ in range(min(count, self.uncached)):
            found.add(block.block_id)
            block = block.next_free_block
        return found

    def detach(self) -> None:
        """Leave the pool to itself again. The count is void from here on."""
        self._free.detach()

    def evict(self, blocks: int) -> int:
        """Evict up to ``blocks`` idle cached blocks, least recently used first, by the pool's own ``evict_blocks``.

        The free queue stays as it is: the victims are its first cached blocks, so without their hashes they are the
        end of its first part. Returns the number evicted. Passes on what the pool raises, with the count still right.
        """
        parts = self._free
        walk = self._walk(blocks)
        if walk is None:
            _log.warning("the free queue changed in an unknown way; the idle blocks were counted again")
            parts.recount()
            walk = self._walk(blocks)
        if walk is None:
            message = "the free queue holds a block that is in use"
            raise RuntimeError(message)
        victims, holes, boundary = walk
        if self.reuses_victims_first and not holes:
            return self._evict_to_front(victims)
        try:
            self._evict_blocks(victims)
        except BaseException:
            parts.recount()
            raise
        parts.holes.difference_update(holes)
        parts.front = max(parts.front, 0) + len(victims) + len(holes)
        parts.boundary = boundary
        return len(victims)

    def _evict_to_front(self, victims: list[int]) -> int:
        """Evict ``victims`` and put them at the head of the queue, where released blocks that cache nothing go, too.

        Otherwise the cache would wander through the whole pool, and no block's memory would stay unused.
        """
        blocks = [self._pool.blocks[each] for each in victims]
        self._pool.touch(blocks)  # with their hashes still: the queue's first part is not concerned
        try:
            self._evict_blocks(victims)
        finally:
            self._pool.free_blocks(blocks)
        return len(victims)

    def check(self, interrupted: Callable[[], bool]) -> bool:
        """Compare the count with a walk over the whole free queue, 0.1 to 0.5 µs per block; keep off the hot path.

        Returns False if ``interrupted`` became true on the way and nothing is known. Raises
        :class:`CountMismatchError`.
        """
        tail = self._queue.fake_free_list_tail
        block = self._queue.fake_free_list_head.next_free_block
        free = cached = 0
        while block is not tail:
            if block is None or block.ref_cnt:
                message = f"the free queue holds a block that is in use, behind {free} free ones"
                raise CountMismatchError(message)
            cached += block.block_hash is not None
            free += 1
            if free % LOOK_UP_BLOCKS == 0 and interrupted():
                return False
            block = block.next_free_block
        if (free, cached) != (self._queue.num_free_blocks, self.count):
            counted = f"{self.count} of {self._queue.num_free_blocks}"
            message = f"{counted} free blocks were counted as idle, and a walk finds {cached} of {free}"
            raise CountMismatchError(message)
        return True

    def _walk(self, blocks: int) -> tuple[list[int], list[int], Block] | None:
        """Look for up to ``blocks`` victims behind the boundary.

        Returns their ids, those of the holes that were passed and the new boundary, or None if the queue is not what it
        has to be.
        """
        queue = self._queue
        tail = queue.fake_free_list_tail
        boundary = self._free.boundary if self._free.front > 0 else queue.fake_free_list_head
        victims: list[int] = []
        holes: list[int] = []
        block = boundary.next_free_block
        while len(victims) < blocks and block is not tail:
            if block is None or block.ref_cnt:
                return None
            (holes if block.block_hash is None else victims).append(block.block_id)
            boundary = block
            block = block.next_free_block
        return victims, holes, boundary


def _raise(error: Exception) -> None:
    raise error
