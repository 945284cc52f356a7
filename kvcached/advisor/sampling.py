"""Which blocks of a prompt are looked at: fixed positions, close together at the head and far apart at the tail.

A block's name fixes everything before it, so its position is part of its identity: one block is either always a sample
or never. Nothing is left to chance, and prompts are dense with samples where they share most, at their head.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

GRADES = ((2048, 64), (8192, 256), (None, 512))
"""Up to which token of a prompt one sample represents how many tokens."""

EVERY_BLOCK = ((None, 1),)
"""Grades that make every block a sample, so that the estimate is an exact simulation."""

_GROW = 64


class SamplePlan:
    """The sampled positions of any chain of blocks, and how many tokens the sample at each represents."""

    def __init__(self, block_tokens: int, grades: Sequence[tuple[int | None, int]] = GRADES) -> None:
        """Plan for blocks of ``block_tokens`` tokens. The last of ``grades`` has no end."""
        self.positions: list[int] = []
        """Indices of the sampled blocks, growing. Made as long as chains need."""
        self.weights: list[int] = []
        """For each sampled block the tokens that it represents."""
        self._block_tokens = block_tokens
        self._grades = tuple(grades)
        self._next_block = 0

    def samples_of(self, blocks: int) -> int:
        """Return how many samples lie in the first ``blocks`` blocks of a chain."""
        while self._next_block < blocks:
            self._grow()
        return bisect_left(self.positions, blocks)

    def _grow(self) -> None:
        for _ in range(_GROW):
            begin = self._next_block
            stride = max(1, self._stride_at(begin * self._block_tokens) // self._block_tokens)
            # In the middle, so that rounding the end of a hit to whole strides errs to both sides alike.
            self.positions.append(begin + stride // 2)
            self.weights.append(stride * self._block_tokens)
            self._next_block = begin + stride

    def _stride_at(self, token: int) -> int:
        return next(stride for end, stride in self._grades if end is None or token < end)
