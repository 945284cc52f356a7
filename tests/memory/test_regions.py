"""Rows as runs, and runs as pages: inward for what is given away, outward for what is needed again."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.memory.madvise import pages_inside
from kvcached.memory.regions import PoolShape, Region, covering_pages, rows_in, runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcached.memory.regions import Run

PAGE = 64
"""A small page, so that small examples meet all ways of sharing one."""

regions = st.builds(Region, st.integers(0, 1000), st.integers(1, 300), st.just(40))
sets_of_rows = st.sets(st.integers(0, 39))

Cover = "Callable[[Region, Run, int], Run]"


def pages_of(ranges: Iterable[Run]) -> set[int]:
    return {page for start, stop in ranges for page in range(start // PAGE, -(-stop // PAGE))}


def bytes_of(region: Region, rows: set[int]) -> set[int]:
    """Return the pages that hold a byte of one of ``rows``, found byte by byte."""
    return {
        (region.address + offset) // PAGE
        for row in rows
        for offset in range(row * region.row_bytes, (row + 1) * region.row_bytes)
    }


@given(st.lists(st.integers(0, 60)))
def test_runs_are_ascending_and_neither_overlap_nor_touch(rows: list[int]) -> None:
    """Runs hold exactly the rows given, and two of them always have a row between them."""
    runs = runs_of(rows)
    assert [row for first, end in runs for row in range(first, end)] == sorted(set(rows))
    assert all(before[1] < after[0] for before, after in pairwise(runs))
    assert rows_in(runs) == len(set(rows))


@given(regions, sets_of_rows)
def test_pages_given_away_hold_nothing_but_the_rows_given(region: Region, rows: set[int]) -> None:
    """No returned page holds a byte of a row that was not returned, or lies outside of the region."""
    given_away = pages_of(pages_inside(region, runs_of(rows), PAGE))
    assert not given_away & bytes_of(region, set(range(region.rows)) - rows)
    end = region.address + region.rows * region.row_bytes
    assert all(region.address <= page * PAGE and (page + 1) * PAGE <= end for page in given_away)


@given(regions, sets_of_rows)
def test_every_whole_page_of_a_run_is_given_away(region: Region, rows: set[int]) -> None:
    """A page all of whose bytes belong to returned rows is returned, also where several rows share it."""
    given_away = pages_of(pages_inside(region, runs_of(rows), PAGE))
    own = bytes_of(region, rows) - bytes_of(region, set(range(region.rows)) - rows)
    ends = {region.address // PAGE, (region.address + region.rows * region.row_bytes) // PAGE}
    assert own - ends <= given_away


def uncovered(cover: Callable[[Region, Run, int], Run], region: Region, rows: set[int], again: set[int]) -> set[int]:
    """Return the pages that were given away with ``rows``, are needed by ``again``, and are not covered for it."""
    given_away = pages_of(pages_inside(region, runs_of(rows), PAGE))
    covered = pages_of(cover(region, run, PAGE) for run in runs_of(again))
    return given_away & bytes_of(region, again) - covered


@given(regions, sets_of_rows, st.data())
def test_taking_rows_again_covers_all_that_was_given_away_of_them(
    region: Region, rows: set[int], data: st.DataObject
) -> None:
    """Whichever part of the returned rows is taken again, each page that it needs is made usable."""
    again = data.draw(st.sets(st.sampled_from(sorted(rows)))) if rows else set()
    assert uncovered(covering_pages, region, rows, again) == set()


def rounded_inward(region: Region, run: Run, page_bytes: int) -> Run:
    """Round as for giving away: the mistake that ends in a crash when rows share a page."""
    return next(iter(pages_inside(region, [run], page_bytes)), (0, 0))


def test_rounding_inward_when_rows_are_taken_again_is_a_mistake_that_is_seen() -> None:
    """The check above finds the seeded mistake: two rows share a page, both go, one comes back without the page."""
    region = Region(0, PAGE // 2, 40)
    assert uncovered(rounded_inward, region, {2, 3}, {2}) == {1}
    assert uncovered(covering_pages, region, {2, 3}, {2}) == set()


@pytest.mark.parametrize("run", [(-1, 2), (39, 41), (5, 4)])
def test_rows_of_nobody_are_refused(run: Run) -> None:
    """Rows that the region does not have raise, because their addresses belong to somebody else."""
    with pytest.raises(ValueError, match="not among the region's 40"):
        list(pages_inside(Region(0, 128, 40), [run], PAGE))


def test_shape_counts_all_ranks() -> None:
    """A pool's bytes are rows, times bytes of a row in all regions of a rank, times ranks."""
    assert PoolShape(rows=10, row_bytes=4096, regions=4, ranks=2).pool_bytes == 81920
