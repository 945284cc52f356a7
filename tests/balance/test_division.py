"""Dividing units: as good as trying everything, and nothing is handed out that brings nothing."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcached.balance.division import divide

if TYPE_CHECKING:
    from collections.abc import Sequence

UNITS = 6


@st.composite
def worths(draw: st.DrawFn) -> list[list[int]]:
    """Draw up to four growing curves over some units; whole numbers, so that equal sums are equal."""
    steps = st.lists(st.integers(0, 5), min_size=UNITS, max_size=UNITS)
    return [list(itertools.accumulate(draw(steps), initial=0)) for _ in range(draw(st.integers(1, 4)))]


def tried(worths: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the best sum of all divisions, and the fewest units that reach it."""
    sums = (
        (sum(worth[count] for worth, count in zip(worths, counts, strict=True)), -sum(counts))
        for counts in itertools.product(range(UNITS + 1), repeat=len(worths))
        if sum(counts) <= UNITS
    )
    best, fewest = max(sums)
    return best, -fewest


@settings(deadline=None, max_examples=80, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(worths())
def test_division_equals_trying_everything(worths: list[list[int]]) -> None:
    """The sum is that of the best of all divisions, within the units, and no unit is handed out for nothing."""
    counts = divide(worths)
    assert len(counts) == len(worths)
    best, fewest = tried(worths)
    assert sum(worth[count] for worth, count in zip(worths, counts, strict=True)) == best
    assert sum(counts) == fewest <= UNITS


def test_cliffs_are_crossed() -> None:
    """Of two working sets of which one fits, one gets all that it needs, though its first units bring nothing."""
    loop = [0.0] * 6 + [10.0] * 5
    assert sorted(divide([loop, loop])) == [0, 6]


def test_nobody_and_nothing() -> None:
    """Without instances there is nothing to divide, and worthless ones get nothing."""
    assert divide([]) == []
    assert divide([[0.0] * 11, [0.0] * 11]) == [0, 0]


def test_sixteen_instances_are_divided_in_a_moment() -> None:
    """Sixteen curves over 200 units take well under a second of CPU, on any machine that runs this."""
    curves = [[count / (count + half) for count in range(201)] for half in range(1, 17)]
    begun = time.process_time()
    assert sum(divide(curves)) == 200
    spent = time.process_time() - begun
    print(f"16 instances, 200 units: {spent * 1000:.1f} ms of CPU")
    assert spent < 1.0
