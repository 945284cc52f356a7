"""Where the KV of a pool lies: one region per tensor, one row per block or slot, and runs of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

Run = tuple[int, int]
"""Rows ``first`` to ``end - 1``, as the pair ``(first, end)``."""


class Region(NamedTuple):
    """One tensor whose outermost dimension is the block or slot id: row ``i`` is one contiguous piece of memory.

    A plain tuple of integers, so that it can be sent to a worker that does not have this package.
    """

    address: int
    """Of the first byte of row 0, in the process that holds the tensor."""
    row_bytes: int
    rows: int


class PoolShape(NamedTuple):
    """How large the KV pool of a replica is, in rows and bytes."""

    rows: int
    row_bytes: int
    """Bytes of one row in all regions of one rank."""
    regions: int = 1
    """How many regions a rank has: one ``madvise`` call per region and run."""
    ranks: int = 1
    """How many ranks hold such a pool each."""

    @property
    def row_bytes_of_all_ranks(self) -> int:
        """Bytes of one row in all regions of all ranks."""
        return self.row_bytes * self.ranks

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool over all ranks."""
        return self.rows * self.row_bytes_of_all_ranks


def runs_of(rows: Iterable[int]) -> list[Run]:
    """Return ``rows``, in any order and with repetitions, as runs: ascending, disjoint, and never adjacent."""
    runs: list[Run] = []
    first = end = -1
    for row in sorted(rows):
        if row <= end:
            end = max(end, row + 1)
            continue
        if end > first:
            runs.append((first, end))
        first, end = row, row + 1
    if end > first:
        runs.append((first, end))
    return runs


def rows_in(runs: Iterable[Run]) -> int:
    """Return how many rows ``runs`` hold together."""
    return sum(end - first for first, end in runs)


def covering_pages(region: Region, run: Run, page_bytes: int) -> Run:
    """Return the byte range of all pages that hold a byte of ``run``: rounded outward.

    This is the range that whoever takes memory again has to make usable. The range that may be given away is smaller:
    it is rounded inward (:func:`kvcached.memory.madvise.pages_inside`). A page that two adjacent rows share is given
    away with both of them, and needed by each.
    """
    first, end = run
    start = region.address + first * region.row_bytes
    stop = region.address + end * region.row_bytes
    return start - start % page_bytes, stop + -stop % page_bytes
