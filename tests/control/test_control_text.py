"""Numbers, times and names as people read them: rounded to what they are, and told apart where space is short."""

from __future__ import annotations

import pytest

from kvcached.control.rendering.table import Cell, Table
from kvcached.control.rendering.text import age, count


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9_999_999, "9,999,999"),
        (10_000_000, "10.0M"),
        (999_940_000, "999.9M"),
        (999_960_000, "1.0G"),
        (1_500_000_000, "1.5G"),
        (999_960_000_000, "1.0T"),
        (2_000_000_000_000_000, "2000.0T"),
    ],
)
def test_counts_move_to_the_next_unit_when_rounded_to_it(number: int, text: str) -> None:
    """A count never shows a thousand of a unit that has a next one."""
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "never"),
        (-3.0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (3569.0, "59 min"),
        (3599.0, "1 h"),
        (86399.0, "1 d"),
        (200_000.0, "2 d"),
    ],
)
def test_ages_move_to_the_next_unit_when_rounded_to_it(seconds: float | None, text: str) -> None:
    """An age never shows sixty of a unit that has a next one."""
    assert age(seconds) == text


def test_names_that_are_cut_can_be_told_apart() -> None:
    """A name is shortened in its middle, so that two of a family do not look alike."""
    table = Table(left_columns=frozenset({0}))
    for name in ("my-model-large-a", "my-model-large-b"):
        table.add(Cell(name), Cell("x" * 50))
    first, second = table.lines(60, colour=False)
    assert first.split() == ["my-m~e-a", "x" * 50]
    assert first != second


def test_cells_steer_no_terminal() -> None:
    """What a table is given is shown without control characters, in cells and in remarks."""
    table = Table(left_columns=frozenset({0}))
    table.add(Cell("a\x1b[31m\nb"))
    table.remark("c\x9b\u202e", "")
    assert list(table.lines(None, colour=False)) == ["a\\x1b[31m\\nb", "    c\\x9b\\u202e"]
