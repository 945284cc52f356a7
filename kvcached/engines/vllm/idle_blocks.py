"""How many blocks of vLLM's pool are cached and used by nobody, in O(1) and with no work per block.

With prefix caching on, vLLM keeps its free queue in two parts::

    head [not cached ...][cached, least recently used first ...] tail

A request's blocks go back to the tail if they are cached and to the head if they are not; new blocks come from the
head; a cache hit takes a cached block out of the middle. So the number of cached blocks in the queue is the queue's
length, which vLLM counts itself, less the length of the first part. Only two calls change the first part, both on whole
batches: ``popleft_n`` shortens it and ``prepend_n`` lengthens it. Frees, hits and hashes of cached blocks cost nothing.

The last block of the first part is the *boundary*: behind it stands the next victim. An eviction moves the boundary on.

vLLM can drop the hash of a block in the second part by itself, when a KV connector failed to load it. Such a *hole* is
counted and is absorbed when the boundary or the queue's head gets there.

Everything here runs on the engine's own thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_log = logging.getLogger(__name__)

POOL_METHODS = ("evict_blocks", "reset_prefix_cache", "get_new_blocks", "free_blocks", "touch")
"""What :class:`IdleBlocks` needs of vLLM's ``BlockPool``."""

QUEUE_METHODS = ("popleft", "popleft_n", "prepend_n", "append", "append_n", "remove")
"""What :class:`IdleBlocks` needs of vLLM's ``FreeKVCacheBlockQueue``."""


class Block(Protocol):
    """The part of vLLM's ``KVCacheBlock`` that is read here; none of it is ever written."""

    block_id: int
    ref_cnt: int
    prev_free_block: Block | None
    next_free_block: Block | None

    @property
    def block_hash(self) -> object | None:
        """The hash under which the block is cached, or None."""


class IdleBlocks:
    """The idle cached blocks of one ``BlockPool``: their number, and their eviction in least recently used order."""

    __slots__ = ("_boundary", "_evict_blocks", "_front", "_holes", "_pool", "_queue")

    def __init__(self, pool: Any) -> None:  # noqa: ANN401 - vLLM's BlockPool; the package does not depend on vLLM
        """Count the pool's idle blocks once, and follow every change from here on."""
        self._pool = pool
        self._queue = pool.free_block_queue
        self._evict_blocks: Callable[[Sequence[int]], None] = pool.evict_blocks
        self._front = 0
        """Length of the first part. ``popleft_n`` may take it below 0, which means 0: it also took cached blocks."""
        self._boundary: Block = self._queue.fake_free_list_head
        """The last block of the first part; without meaning while that part is empty."""
        self._holes = 0
        self.recount()
        self._follow_queue()
        self._follow_pool()

    @property
    def count(self) -> int:
        """How many cached blocks stand in the free queue."""
        front = self._front
        free: int = self._queue.num_free_blocks
        return (free - front if front > 0 else free) - self._holes

    @property
    def used(self) -> int:
        """How many blocks requests hold (the pool's null block is not among them)."""
        used: int = self._pool.num_gpu_blocks - 1 - self._queue.num_free_blocks
        return used

    @property
    def total(self) -> int:
        """How many blocks requests can have in all."""
        total: int = self._pool.num_gpu_blocks - 1
        return total

    def evict(self, blocks: int) -> int:
        """Evict up to ``blocks`` idle cached blocks, least recently used first, by the pool's own ``evict_blocks``.

        The free queue stays as it is: the victims are its first cached blocks, so without their hashes they are the
        end of its first part. Returns the number evicted. Passes on what the pool raises, with the count still right.
        """
        walk = self._walk(blocks)
        if walk is None:
            _log.warning("the free queue was changed in an unknown way; the idle blocks were counted afresh")
            self.recount()
            walk = self._walk(blocks)
        if walk is None:
            message = "the free queue holds a block that is in use"
            raise RuntimeError(message)
        victims, passed, boundary = walk
        try:
            self._evict_blocks(victims)
        except BaseException:
            self.recount()
            raise
        self._holes -= passed - len(victims)
        self._front = max(self._front, 0) + passed
        self._boundary = boundary
        return len(victims)

    def _walk(self, blocks: int) -> tuple[list[int], int, Block] | None:
        """Look for up to ``blocks`` victims behind the boundary.

        Returns their ids, how many blocks were passed (victims and holes) and the new boundary, or None if the queue is
        not what it has to be.
        """
        queue = self._queue
        tail = queue.fake_free_list_tail
        boundary = self._boundary if self._front > 0 else queue.fake_free_list_head
        victims: list[int] = []
        passed = 0
        block = boundary.next_free_block
        while len(victims) < blocks and block is not tail:
            if block is None or block.ref_cnt:
                return None
            if block.block_hash is not None:
                victims.append(block.block_id)
            boundary = block
            passed += 1
            block = block.next_free_block
        return victims, passed, boundary

    def recount(self) -> None:
        """Find length, boundary and holes by a walk over the whole free queue."""
        queue = self._queue
        tail = queue.fake_free_list_tail
        boundary = queue.fake_free_list_head
        front = 0
        block = boundary.next_free_block
        while block is not tail and block.block_hash is None:
            boundary = block
            front += 1
            block = block.next_free_block
        holes = 0
        while block is not tail:
            holes += block.block_hash is None
            block = block.next_free_block
        self._front, self._boundary, self._holes = front, boundary, holes

    def _follow_queue(self) -> None:
        """Put our step around the queue's methods that change the first part.

        The methods are replaced on this one queue, not on the class: the pools of CPU offloading are none of ours, and
        a function in the instance is also the cheapest thing to call.
        """
        queue = self._queue
        popleft, popleft_n = queue.popleft, queue.popleft_n
        prepend_n, append = queue.prepend_n, queue.append

        def follow_popleft() -> Block:
            block: Block = popleft()
            self._popped([block])
            return block

        def follow_popleft_n(n: int) -> list[Block]:
            blocks: list[Block] = popleft_n(n)
            if self._holes:
                self._popped(blocks)
            else:
                self._front -= n
            return blocks

        def follow_prepend_n(blocks: list[Block]) -> None:
            if not blocks:
                return
            prepend_n(blocks)
            front = self._front
            if front > 0:
                self._front = front + len(blocks)
            else:
                self._front = len(blocks)
                self._boundary = blocks[-1]

        def follow_append(block: Block) -> None:
            append(block)
            self._holes += block.block_hash is None

        queue.popleft = follow_popleft
        queue.popleft_n = follow_popleft_n
        queue.prepend_n = follow_prepend_n
        queue.append = follow_append

    def _follow_pool(self) -> None:
        """Put our step around the pool's methods that take hashes from blocks in the queue."""
        pool = self._pool
        evict_blocks, reset_prefix_cache = pool.evict_blocks, pool.reset_prefix_cache
        unpin_blocks: Any = getattr(pool, "unpin_blocks", None)  # since 0.30

        def follow_evict_blocks(block_ids: Iterable[int]) -> None:
            blocks = pool.blocks
            idle = [blocks[each] for each in block_ids if each < len(blocks) and _is_idle(blocks[each])]
            try:
                evict_blocks(block_ids)
            finally:
                self._holes += sum(block.block_hash is None for block in idle)

        def follow_reset_prefix_cache() -> bool:
            done: bool = reset_prefix_cache()
            if done:
                self.recount()
            return done

        def follow_unpin_blocks(blocks: Iterable[Block], on_reuse: Callable[[Block], None]) -> None:
            blocks = list(blocks)
            unpin_blocks(blocks, on_reuse)
            released = {block.block_id: block for block in blocks if block.ref_cnt == 0}
            self._holes += sum(block.block_hash is None for block in released.values())

        pool.evict_blocks = follow_evict_blocks
        pool.reset_prefix_cache = follow_reset_prefix_cache
        if unpin_blocks is not None:
            pool.unpin_blocks = follow_unpin_blocks

    def _popped(self, blocks: Sequence[Block]) -> None:
        """Account for blocks that left the head of the queue while there may be holes behind the first part."""
        front = max(self._front, 0)
        beyond = blocks[front:]
        self._front = front - len(blocks)
        if self._holes:
            self._holes -= sum(block.block_hash is None for block in beyond)


def _is_idle(block: Block) -> bool:
    """Return whether ``block`` stands in the free queue with a hash."""
    return block.ref_cnt == 0 and block.block_hash is not None and block.next_free_block is not None
