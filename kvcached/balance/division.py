"""The division of a budget in units: the best sum over all ways to hand them out.

It is exact, so it crosses cliffs: a working set that is worth nothing until all of it fits gets all or nothing. A rule
that follows the slope of the curves would leave it where it is.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def divide(worths: Sequence[Sequence[float]]) -> list[int]:
    """Return how many units each gets. ``worths[i][n]`` is what ``n`` units are worth to ``i``, for n from 0 on.

    All items are equally long; the last number of units in them is what there is to divide. Of divisions of equal worth
    one that hands out the fewest units is returned. The time grows with the items and the square of the units.
    """
    if not worths:
        return []
    best = list(worths[0])
    choices: list[list[int]] = []
    for worth in worths[1:]:
        best, chosen = _combined(best, _without_flat_end(worth))
        choices.append(chosen)
    left = best.index(max(best))
    units = []
    for chosen in reversed(choices):
        units.append(chosen[left])
        left -= chosen[left]
    return [left, *reversed(units)]


def _combined(best: Sequence[float], worth: Sequence[float]) -> tuple[list[float], list[int]]:
    """Return the best sum for each number of units shared with one more item, and what that item gets of them."""
    sums, chosen = [], []
    for units in range(len(best)):
        ways = list(map(add, worth, best[units::-1]))
        top = max(ways)
        sums.append(top)
        chosen.append(ways.index(top))
    return sums, chosen


def _without_flat_end(worth: Sequence[float]) -> Sequence[float]:
    """Return the values up to the first of the largest: no division needs what comes after it."""
    return worth[: worth.index(max(worth)) + 1]
