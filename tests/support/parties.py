"""Parties of a decision whose curves have a known shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached.advisor.reading import Curve
from kvcached.balance.standing import Party, Standing
from kvcached.balance.worth import Worth

if TYPE_CHECKING:
    from collections.abc import Sequence

GRID = tuple(range(1000, 101_000, 1000))
"""The limits of all curves here, in tokens."""


def worth_over(values: Sequence[float]) -> Worth:
    """Return the worth of a curve with these rates at limit 0 and at each limit of :data:`GRID`."""
    return Worth(((Curve(GRID, tuple(values), 0.5, 0.0, GRID[-1], 0.0), 1.0),))


def saturating(most: float, half_tokens: int) -> Worth:
    """Return a concave curve that reaches half of ``most`` at ``half_tokens``."""
    return worth_over([most * tokens / (tokens + half_tokens) for tokens in (0, *GRID)])


def cliff(most: float, tokens: int) -> Worth:
    """Return the curve of a loop over a working set: nothing until all of it fits."""
    return worth_over([most if limit >= tokens else 0.0 for limit in (0, *GRID)])


def useless() -> Worth:
    """Return the curve of prompts that never come again."""
    return worth_over([0.0] * (len(GRID) + 1))


def party(name: str, limit: int, worth: Worth | None, **fields: Any) -> Party:  # noqa: ANN401 - any field of a party
    """Return an instance at ``limit`` tokens with 1,000 prompt tokens a second and blocks of 16 tokens."""
    defaults = {"traffic": 1000.0, "known_s": 1000.0, "block_tokens": 16, "floor_tokens": 160}
    standing = Standing.BALANCED if worth is not None else Standing.HELD
    return Party(name, standing, "", fields.pop("held", limit), limit, worth=worth, **{**defaults, **fields})
