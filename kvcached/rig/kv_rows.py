"""The KV tensor: what a cached block really holds, so that a wrong block is seen and not only suspected."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch

from kvcached.memory.regions import Region
from kvcached.rig.config import TOKEN_BYTES

if TYPE_CHECKING:
    from kvcached.memory.pool_memory import PoolMemory

_WORD_BYTES = 8


class CorruptBlockError(AssertionError):
    """A block that was handed out as a hit does not hold what was written for its key."""


class KvRows:
    """One row per block; every word of a row carries the key of the tokens that were computed into it.

    The rows lie in private anonymous memory, all of which is written at the start, as engines do it.
    """

    def __init__(self, blocks: int, block_tokens: int, token_bytes: int = TOKEN_BYTES) -> None:
        """Allocate ``blocks`` rows of ``block_tokens`` tokens, ``token_bytes`` each."""
        words = max(1, block_tokens * token_bytes // _WORD_BYTES)
        self.row_bytes = words * _WORD_BYTES
        """Bytes of one row: of one block on this rank."""
        self.memory: PoolMemory | None = None
        """Told which rows are about to be written."""
        self._mapping = mmap.mmap(-1, blocks * self.row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._rows = torch.frombuffer(self._mapping, dtype=torch.int64).view(blocks, words).zero_()

    def region(self) -> Region:
        """Return where the rows are in this process."""
        return Region(self._rows.data_ptr(), self.row_bytes, self._rows.shape[0])

    def take(self, blocks: list[int]) -> None:
        """Note that a request was given ``blocks``."""
        memory = self.memory
        if memory is not None and memory.follows_taking:
            memory.take(blocks)

    def write(self, blocks: list[int], keys: list[int]) -> None:
        """Compute ``keys`` into ``blocks``; both are in the same order."""
        self._rows[_vector(blocks)] = _vector(keys)[:, None]

    def verify(self, blocks: list[int], keys: list[int]) -> None:
        """Raise :class:`CorruptBlockError` unless each of ``blocks`` holds its key throughout."""
        expected = _vector(keys)[:, None]
        if bool((self._rows[_vector(blocks)] == expected).all()):
            return
        wrong = [block for block, key in zip(blocks, keys, strict=True) if bool((self._rows[block] != key).any())]
        message = f"blocks {wrong} do not hold the keys they are cached under"
        raise CorruptBlockError(message)


def _vector(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
