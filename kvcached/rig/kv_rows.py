"""The KV tensor: what a cached block really holds, so that a wrong block is seen and not only suspected."""

from __future__ import annotations

import torch

BYTES_PER_TOKEN = 4
_WORD_BYTES = 8


class CorruptBlockError(AssertionError):
    """A block that was handed out as a hit does not hold what was written for its key."""


class KvRows:
    """One row per block; every word of a row carries the key of the tokens that were computed into it."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        """Allocate ``blocks`` rows of ``block_tokens`` tokens, :data:`BYTES_PER_TOKEN` bytes each."""
        words = max(1, block_tokens * BYTES_PER_TOKEN // _WORD_BYTES)
        self._rows = torch.zeros((blocks, words), dtype=torch.int64)

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
