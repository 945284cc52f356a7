"""From a replica's page to rates: a window's sums as a curve, and what makes one doubt it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from kvcached.advisor.curve import value_at

if TYPE_CHECKING:
    from kvcached.advisor.page import Page, PageWindow

NOW, LONG = "now", "long"
WINDOWS = (NOW, LONG)

DISAGREEMENT = 0.03
"""How far model and engine may differ at the limit in force before nothing is advised."""

CHANGE = 0.05
"""How far the two windows may differ before traffic counts as changing."""

LEAST_REQUESTS = 100
"""Below how many requests nothing is advised."""

STALE_S = 30.0
"""How old a busy engine's page may be."""


@dataclass(frozen=True)
class Curve:
    """One window of a page as rates. ``values[0]`` is the rate at limit 0, ``values[i]`` that at ``limits[i-1]``.

    ``model_error`` is the measured rate less the model's at the limits that were in force; it is added to all values.
    ``model_in_use`` is what the model hits on blocks that other requests use, without that addition.
    ``room_tokens`` is the pool's average free space beside running requests: a limit above it is as good as this one.
    """

    limits: tuple[int, ...]
    values: tuple[float, ...]
    measured: float
    model_error: float
    room_tokens: int
    model_in_use: float

    def at(self, limit: float) -> float:
        """Return the rate at a limit in this pool."""
        return value_at(self.limits, self.values, min(limit, self.room_tokens))

    def points(self) -> list[tuple[int, float]]:
        """Return limits, from 0 on, with their rates in this pool."""
        return [(limit, self.at(limit)) for limit in (0, *self.limits)]


def curve_of(page: Page, window: PageWindow, *, anchored: bool = True) -> Curve:
    """Return a window's sums as rates, moved by what the engine measured against the model unless ``anchored`` is off.

    The window has to have seen prompt tokens.
    """
    error = (window.hit - window.predicted) / window.prompt
    moved = error if anchored else 0.0
    values = tuple(min(1.0, max(0.0, tokens / window.prompt + moved)) for tokens in accumulate(window.buckets))
    room = max(0, page.capacity_tokens - round(page.in_use_mean))
    measured = min(1.0, window.hit / window.prompt)
    return Curve(page.limits, values, measured, error, room, window.buckets[0] / window.prompt)


def differing_by(page: Page) -> float:
    """Return by how much the rates of a page's two windows differ at most; both have to have seen prompt tokens."""
    now, long = (curve_of(page, window).values for window in page.windows)
    return max(abs(one - other) for one, other in zip(now, long, strict=True))


def current_window(page: Page) -> PageWindow:
    """Return the window *long*, or *now* while the two differ by more than :data:`CHANGE`."""
    now, long = page.windows
    if min(now.prompt, long.prompt) <= 0:
        return now
    return now if differing_by(page) > CHANGE else long
