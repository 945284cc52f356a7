"""A hit-rate curve in plain characters, for any terminal and any log."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached.advisor.reading import Curve
    from kvcached.control.queries.recommendation import Advice

ROWS = 12
LEAST_COLUMNS = 32
MOST_COLUMNS = 100
_MARGIN = 8

_UNITS = ((1_000_000_000, "g"), (1_000_000, "m"), (1000, "k"))


def curve_lines(advice: Advice, width: int | None) -> list[str]:
    """Return the curve over the logarithm of the limit: ``*`` the model, ``o`` measured, ``A`` the advice.

    ``|`` marks the free space of the pool: beyond it a limit changes nothing.
    """
    curve = advice.curve
    if curve is None:
        return []
    columns = min(MOST_COLUMNS, max(LEAST_COLUMNS, (width or 80) - _MARGIN - 1))
    scale = _Scale(curve, columns)
    grid = [[" "] * columns for _ in range(ROWS + 1)]
    if curve.limits[0] < curve.room_tokens < curve.limits[-1]:
        for row in grid:
            row[scale.column(curve.room_tokens)] = "|"
    for column in range(columns):
        grid[scale.row(curve.at(scale.limit(column)))][column] = "*"
    in_force = advice.limit_tokens
    if in_force is not None:
        place = curve.room_tokens if in_force < 0 else min(in_force, curve.room_tokens)
        grid[scale.row(curve.measured)][scale.column(place)] = "o"
    if advice.advised_limit_tokens is not None:
        grid[scale.row(advice.wanted or 0.0)][scale.column(advice.advised_limit_tokens)] = "A"
    return [*_with_rates(grid, scale), *_axis(scale)]


class _Scale:
    """Where rates and limits lie."""

    def __init__(self, curve: Curve, columns: int) -> None:
        self.columns = columns
        self.low, self.high = curve.limits[0], max(curve.limits[-1], curve.limits[0] * 2)
        self.top = max(*curve.values, curve.measured, 0.01)

    def column(self, limit: float) -> int:
        """Return the column of a limit; one that is too small is at the left."""
        share = math.log(max(limit, self.low) / self.low) / math.log(self.high / self.low)
        return min(self.columns - 1, max(0, round(share * (self.columns - 1))))

    def limit(self, column: int) -> float:
        """Return the limit of a column; the first one is limit 0."""
        return 0.0 if column == 0 else self.low * float(self.high / self.low) ** (column / (self.columns - 1))

    def row(self, rate: float) -> int:
        """Return the row of a rate, from the top."""
        return min(ROWS, max(0, round((1 - rate / self.top) * ROWS)))


def _with_rates(grid: list[list[str]], scale: _Scale) -> list[str]:
    lines = []
    for number, row in enumerate(grid):
        label = f"{scale.top * (1 - number / ROWS):.2f}" if number % 3 == 0 else ""
        lines.append(f"{label:>6} |{''.join(row)}".rstrip())
    return lines


def _axis(scale: _Scale) -> list[str]:
    labels = [" "] * (scale.columns + _MARGIN)
    for place in range(5):
        column = round(place * (scale.columns - 1) / 4)
        text = short(scale.limit(column))
        begin = min(column, scale.columns - len(text))
        labels[begin : begin + len(text)] = text
    return [f"{'':>6} +{'-' * scale.columns}", f"{'':>8}{''.join(labels).rstrip()}"]


def short(tokens: float) -> str:
    """Return 1234567 as 1.23m, in the unit that keeps three digits."""
    for size, unit in _UNITS:
        if tokens / size >= _ROUNDS_UP:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.0f}"


_ROUNDS_UP = 0.9995
"""From where on the next smaller unit would show 1000."""
