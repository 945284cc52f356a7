"""A hit rate over the limit: reading it between two limits, and the other way round.

Both directions are linear in the logarithm of the limit, and below the smallest limit linear in the limit itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

SMALLEST_LIMIT = 512
"""The smallest limit that is looked at, in tokens, where blocks are smaller."""

FINE_FROM = 16384
"""From which limit on the limits are spaced closely."""

MOST_LIMITS = 62
"""How many limits are looked at, at most."""

if TYPE_CHECKING:
    from collections.abc import Sequence


def value_at(limits: Sequence[int], values: Sequence[float], limit: float) -> float:
    """Return the value at ``limit`` tokens. ``values[0]`` is that at limit 0, ``values[i]`` that at ``limits[i-1]``."""
    if limit >= limits[-1]:
        return values[-1]
    if limit <= 0:
        return values[0]
    place = bisect_left(limits, limit)
    if place == 0:
        share = limit / limits[0]
    else:
        share = math.log(limit / limits[place - 1]) / math.log(limits[place] / limits[place - 1])
    return values[place] + share * (values[place + 1] - values[place])


def limit_for(limits: Sequence[int], values: Sequence[float], wanted: float) -> float | None:
    """Return the smallest limit at which the growing ``values`` reach ``wanted``; None if they never do."""
    if wanted <= values[0]:
        return 0.0
    place = bisect_left(values, wanted)
    if place == len(values):
        return None
    share = (wanted - values[place - 1]) / (values[place] - values[place - 1])
    if place == 1:
        return share * limits[0]
    return float(limits[place - 2] * (limits[place - 1] / limits[place - 2]) ** share)


def spaced_limits(block_tokens: int, largest: int, also: int = 0) -> list[int]:
    """Return growing limits up to ``largest`` tokens, in whole blocks, and the limit ``also`` among them as it is.

    Four to each doubling, and two below :data:`FINE_FROM` tokens, where little is to be told apart; fewer where that
    would be more than :data:`MOST_LIMITS`.
    """
    smallest = max(block_tokens, SMALLEST_LIMIT // block_tokens * block_tokens)
    largest = max(largest // block_tokens * block_tokens, smallest)
    per_doubling = 4.0
    found: set[int] = set()
    while not found or len(found) > MOST_LIMITS - 1:
        found = _spaced(block_tokens, smallest, largest, per_doubling)
        per_doubling *= 0.9
    if 0 < also < largest:
        found.add(also)
    return sorted(found)


def _spaced(block_tokens: int, smallest: int, largest: int, per_doubling: float) -> set[int]:
    found = {smallest}
    limit = float(largest)
    while limit > smallest:
        found.add(max(round(limit / block_tokens) * block_tokens, smallest))
        limit /= 2 ** (1 / per_doubling if limit > FINE_FROM else 2 / per_doubling)
    return found
