"""Follows what vLLM does to one block pool, and so knows which part of its free queue is not cached.

With prefix caching on, vLLM keeps its free queue in two parts::

    head [not cached ...][cached, least recently used first ...] tail

A request's blocks go back to the tail if they are cached and to the head if they are not; new blocks come from the
head; a cache hit takes a cached block out of the middle. Only two calls change the first part, both on whole batches:
``popleft_n`` shortens it and ``prepend_n`` lengthens it. Frees, hits and hashes of cached blocks cost nothing.

A block without a hash in the second part is a *hole*: a KV connector failed to load it, or it was unpinned. Holes are
known by their ids. Unpinned blocks may be taken back out of the middle of the queue, so ``remove`` is followed, too,
from the first unpinned block on.

vLLM's reset of the prefix cache wants the pool whole: sleep, pause and a reload end in it, and it is refused while
blocks are in use, as withheld ones are. So the cap is lifted before it, and enforced again after it.

The methods are replaced on this one pool and queue. Arguments pass through as they are, and whatever goes wrong in our
own step ends the following, never vLLM's call. Everything here runs on the engine's own thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from kvcached.engines.vllm.pool_block import NO_CAP, NO_MEMORY, is_idle
from kvcached.engines.vllm.wraps import Wraps
from kvcached.guards import call_guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvcached.engines.vllm.pool_block import Block, Cap, TakenBlocks

POOL_METHODS = ("evict_blocks", "reset_prefix_cache", "get_new_blocks", "free_blocks", "touch")
"""What is needed of vLLM's ``BlockPool``."""

QUEUE_METHODS = ("popleft", "popleft_n", "prepend_n", "append", "append_n", "remove")
"""What is needed of vLLM's ``FreeKVCacheBlockQueue``."""


_UNSEEN = object()
"""What a look before vLLM's call returns that failed: nothing is left to follow after the call."""


class FreeQueue:
    """One pool's free queue: where its first part ends, and which holes the second one has."""

    __slots__ = (
        "_on_fault",
        "_pool",
        "_wraps",
        "boundary",
        "cap",
        "follows_remove",
        "front",
        "holes",
        "memory",
        "queue",
        "stock_evict_blocks",
    )

    def __init__(self, pool: Any, on_fault: Callable[[Exception], None]) -> None:  # noqa: ANN401 - vLLM's BlockPool
        """Look at the queue once, and follow every change from here on.

        ``on_fault`` gets an exception of our own step, after the stock methods were given back.
        """
        self._pool = pool
        self._on_fault = on_fault
        self._wraps = Wraps()
        self.queue = pool.free_block_queue
        self.stock_evict_blocks: Callable[[Sequence[int]], None] = pool.evict_blocks
        self.front = 0
        """Length of the first part. ``popleft_n`` may take it below 0, which means 0: it also took cached blocks."""
        self.boundary: Block = self.queue.fake_free_list_head
        """The last block of the first part; without meaning while that part is empty."""
        self.holes: set[int] = set()
        self.follows_remove = False
        """Whether blocks were ever unpinned: free ones may be adopted with what they hold."""
        self.memory: TakenBlocks = NO_MEMORY
        """Hears which blocks are handed out."""
        self.cap: Cap = NO_CAP
        """Is lifted around resets."""
        self.recount()
        try:
            self._follow_batches()
            self._follow_rare_calls()
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Give the stock methods back."""
        self.cap = NO_CAP
        self._wraps.undo()

    def recount(self) -> None:
        """Find length, boundary and holes by a walk over the whole queue."""
        tail = self.queue.fake_free_list_tail
        boundary = self.queue.fake_free_list_head
        front = 0
        block = boundary.next_free_block
        while block is not tail and block.block_hash is None:
            boundary = block
            front += 1
            block = block.next_free_block
        holes = set()
        while block is not tail:
            if block.block_hash is None:
                holes.add(block.block_id)
            block = block.next_free_block
        self.front, self.boundary, self.holes = front, boundary, holes

    def _fault(self, error: Exception) -> None:
        self.detach()
        self._on_fault(error)

    def _fault_before(self, error: Exception) -> object:
        self._fault(error)
        return _UNSEEN

    def _follow_batches(self) -> None:
        """Put our step around the two calls that every request makes.

        Where they take the one argument that is known, ours take it, too: a wrapper that takes anything costs a
        quarter of what they cost themselves.
        """
        popleft_n, prepend_n = self.queue.popleft_n, self.queue.prepend_n
        if _takes_only(popleft_n, "n"):
            self._wraps.replace(self.queue, "popleft_n", self._following_popleft_n(popleft_n))
        else:
            self._follow(self.queue, "popleft_n", lambda blocks, _: self._handed_out(blocks))
        if _takes_only(prepend_n, "blocks"):
            self._wraps.replace(self.queue, "prepend_n", self._following_prepend_n(prepend_n))
        else:
            self._follow(self.queue, "prepend_n", lambda _, blocks: self._prepended(blocks), argument="blocks")

    def _following_popleft_n(self, popleft_n: Callable[[int], Any]) -> Callable[[int], Any]:
        def follow_popleft_n(n: int) -> Any:  # noqa: ANN401 - whatever vLLM returns
            blocks = popleft_n(n)
            try:
                if self.holes:
                    self._popped(blocks)
                else:
                    self.front -= len(blocks)
                if self.memory.follows_taking:
                    self.memory.take([block.block_id for block in blocks])
            except Exception as error:  # noqa: BLE001 - a fault of ours must not be vLLM's; inline: runs with each request
                self._fault(error)
            return blocks

        return follow_popleft_n

    def _following_prepend_n(self, prepend_n: Callable[[list[Block]], Any]) -> Callable[[list[Block]], Any]:
        def follow_prepend_n(blocks: list[Block]) -> Any:  # noqa: ANN401
            if not blocks:
                return None  # what it does itself
            result = prepend_n(blocks)
            try:
                front = self.front
                if front > 0:
                    self.front = front + len(blocks)
                else:
                    self._prepended(blocks)
            except Exception as error:  # noqa: BLE001 - as after popleft_n
                self._fault(error)
            return result

        return follow_prepend_n

    def _follow_rare_calls(self) -> None:
        self._follow(self.queue, "popleft", lambda block, _: self._handed_out([block]))
        self._follow(self.queue, "append", lambda _, block: self._note_holes([block]), argument="block")
        self._follow_resets()
        self._follow(
            self._pool, "evict_blocks", lambda _, idle: self._note_holes(idle), self._idle_of, argument="block_ids"
        )
        if hasattr(self._pool, "unpin_blocks"):  # since 0.30
            self._follow(self._pool, "unpin_blocks", lambda _, blocks: self._unpinned(blocks), argument="blocks")

    def _follow(
        self,
        owner: Any,  # noqa: ANN401 - an object of vLLM's
        name: str,
        after: Callable[[Any, Any], None],
        before: Callable[[Any], Any] | None = None,
        argument: str | None = None,
    ) -> None:
        """Follow ``owner.name`` by ``after(result, seen)``: ``seen`` is its first argument, or what ``before`` made."""
        stock = getattr(owner, name)

        def look(args: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401
            first = None if argument is None else args[0] if args else named[argument]
            return first if before is None else before(first)

        def followed(*args: Any, **named: Any) -> Any:  # noqa: ANN401
            seen = call_guarded(self._fault_before, look, args, named)
            try:
                result = stock(*args, **named)
            except BaseException:  # it may have got half-way
                call_guarded(self._fault, self.recount)
                raise
            if seen is not _UNSEEN:
                call_guarded(self._fault, after, result, seen)
            return result

        self._wraps.replace(owner, name, followed)

    def _follow_resets(self) -> None:
        """Let the pool be whole while vLLM resets its prefix cache, also where the reset fails."""
        stock = self._pool.reset_prefix_cache

        def reset_prefix_cache(*args: Any, **named: Any) -> Any:  # noqa: ANN401
            call_guarded(self._fault, self.cap.lift)
            try:
                return stock(*args, **named)
            finally:
                call_guarded(self._fault, self._after_reset)

        self._wraps.replace(self._pool, "reset_prefix_cache", reset_prefix_cache)

    def _after_reset(self) -> None:
        self.recount()  # it changes the pool as a whole: what takes blocks again has to know
        self.cap.resume()

    def _prepended(self, blocks: list[Block]) -> None:
        """Account for blocks that were put in front of the first part."""
        if self.front > 0:
            self.front += len(blocks)
        elif blocks:
            self.front = len(blocks)
            self.boundary = blocks[-1]

    def _popped(self, blocks: Sequence[Block]) -> None:
        """Account for blocks that left the head of the queue while there may be holes behind the first part."""
        front = max(self.front, 0)
        self.front = front - len(blocks)
        self.holes.difference_update(block.block_id for block in blocks[front:])

    def _handed_out(self, blocks: Sequence[Block]) -> None:
        self._popped(blocks)
        if self.memory.follows_taking:
            self.memory.take([block.block_id for block in blocks])

    def _idle_of(self, block_ids: Any) -> list[Block] | None:  # noqa: ANN401
        """Return which of the blocks are in the queue with a hash; None if they can be looked at only once."""
        if not isinstance(block_ids, Collection):
            return None
        blocks = self._pool.blocks
        return [blocks[each] for each in block_ids if each < len(blocks) and is_idle(blocks[each])]

    def _note_holes(self, blocks: Iterable[Block] | None) -> None:
        """Note the blocks that are in the second part without a hash now."""
        if blocks is None:
            self.recount()
        else:
            self.holes.update(block.block_id for block in blocks if block.block_hash is None)

    def _unpinned(self, blocks: Any) -> None:  # noqa: ANN401
        """Note the blocks that went to the tail, whatever their hashes, and may come back from there."""
        if not self.follows_remove:
            self.follows_remove = True
            self._follow_remove()
        if isinstance(blocks, Collection):
            self._note_holes([block for block in blocks if block.ref_cnt == 0])
        else:
            self.recount()

    def _follow_remove(self) -> None:
        """Put our step around ``remove``, which a hit makes for each of its blocks."""
        remove = self.queue.remove

        def follow_remove(*args: Any, **named: Any) -> Any:  # noqa: ANN401
            block, previous = None, None
            if args or "block" in named:
                block = args[0] if args else named["block"]
                previous = getattr(block, "prev_free_block", None)
            result = remove(*args, **named)
            call_guarded(self._fault, self._removed, block, previous)
            return result

        self._wraps.replace(self.queue, "remove", follow_remove)

    def _removed(self, block: Any, previous: Any) -> None:  # noqa: ANN401 - a Block, if vLLM still passes one
        """Account for a block that was taken out of the queue's middle."""
        if block.block_hash is not None:
            return
        if block.block_id in self.holes:
            self.holes.discard(block.block_id)
            return
        self.front -= 1
        if block is self.boundary:
            self.boundary = previous


def _takes_only(method: Callable[..., Any], name: str) -> bool:
    """Return whether ``method`` has exactly one parameter, of this name."""
    return list(inspect.signature(method).parameters) == [name]
