"""What was counted, with less weight the longer ago: two histograms that forget at different speed.

Time is counted in prompt tokens, so that a quiet night forgets nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.advisor.curve import value_at

if TYPE_CHECKING:
    from collections.abc import Sequence

NOW_TOKENS = 4_000_000
"""After how many prompt tokens something counts for half in the window *now*."""

LONG_TOKENS = 32_000_000
"""The same of the window *long*."""


@dataclass
class Tally:
    """Plain sums over some requests, in tokens.

    ``prompt`` is what was asked for, ``hit`` what the engine found cached, and ``buckets`` where the model finds it:
    item 0 in blocks in use, item ``i`` only at the ``i``-th limit and above.
    """

    buckets: list[int]
    prompt: int = 0
    hit: int = 0


class Window:
    """A decaying sum of tallies. ``predicted`` are the hit tokens that the model sees at the limits in force."""

    def __init__(self, half_life: float, buckets: int) -> None:
        """Begin empty; after ``half_life`` prompt tokens a tally counts for half."""
        self.half_life = half_life
        self.prompt = 0.0
        self.hit = 0.0
        self.predicted = 0.0
        self.buckets = [0.0] * buckets

    def add(self, tally: Tally, predicted: float) -> None:
        """Add ``tally``, after all before it has aged by its prompt tokens."""
        keep: float = 0.5 ** (tally.prompt / self.half_life)
        self.prompt = self.prompt * keep + tally.prompt
        self.hit = self.hit * keep + tally.hit
        self.predicted = self.predicted * keep + predicted
        self.buckets = [old * keep + new for old, new in zip(self.buckets, tally.buckets, strict=True)]


def predicted_hits(limits: Sequence[int], tally: Tally, limit: float) -> float:
    """Return the hit tokens that the model sees in ``tally`` at ``limit`` tokens."""
    total = 0
    sums = [total := total + bucket for bucket in tally.buckets]
    return value_at(limits, sums, limit)
