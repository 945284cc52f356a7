"""What is read of a block of vLLM's, who hears that blocks are handed out, and who lifts the cap around a reset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection


class Block(Protocol):
    """The part of vLLM's ``KVCacheBlock`` that is read here; none of it is ever written."""

    block_id: int
    ref_cnt: int
    prev_free_block: Block | None
    next_free_block: Block | None

    @property
    def block_hash(self) -> object | None:
        """The hash under which the block is cached, or None."""


class TakenBlocks(Protocol):
    """The part of ``kvcached.memory.pool_memory.PoolMemory`` that hears which blocks are handed out."""

    follows_taking: bool
    """Whether it wants to hear it."""

    def take(self, rows: Collection[int]) -> None:
        """Note that blocks with these ids are handed out."""


class _NoMemory:
    """Hears nothing."""

    follows_taking = False

    def take(self, rows: Collection[int]) -> None:
        """Do nothing."""


NO_MEMORY: TakenBlocks = _NoMemory()


class Cap(Protocol):
    """The part of ``kvcached.replica_policy.ReplicaPolicy`` that a reset of the pool needs."""

    def lift(self) -> None:
        """Give withheld blocks back."""

    def resume(self) -> None:
        """Take them out again, beginning with one chunk."""


class _NoCap:
    """Withholds nothing."""

    def lift(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""


NO_CAP: Cap = _NoCap()


def is_idle(block: Block) -> bool:
    """Return whether ``block`` is in the free queue with a hash."""
    return block.ref_cnt == 0 and block.block_hash is not None and block.next_free_block is not None
