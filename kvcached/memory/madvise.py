"""What runs in the process that holds the tensors: give pages back with ``madvise``, and find what stands against it.

Standard library and ``kvcached.guards`` only, no state, nothing but plain tuples in and out:
``cloudpickle.register_pickle_by_value`` on both modules lets an engine's plugin send :func:`return_rows` and
:func:`prepare` to a worker process that does not have this package. These two never raise. Rows have to be returned in
order with the engine's steps: one that is used again before the call would be wiped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import TYPE_CHECKING

from kvcached.guards import call_guarded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PAGE_BYTES = mmap.PAGESIZE
MADV_DONTNEED = 4
MADV_NOHUGEPAGE = 15

HUGE_PAGE_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"
SMAPS = "/proc/self/smaps"

OBSTACLES = {
    "ht": "its memory is in huge pages of hugetlbfs",
    "lo": "its memory is locked (mlock)",
    "sh": "its memory is shared with other processes",
    "pf": "its memory belongs to a device",
    "io": "its memory belongs to a device",
}
"""Flags of ``VmFlags`` in smaps that say that ``MADV_DONTNEED`` would be refused, or would free nothing."""

EXPLANATIONS = {
    errno.EINVAL: "EINVAL: the memory is locked or in huge pages",
    errno.ENOMEM: "ENOMEM: part of the range is not mapped",
    errno.EPERM: "EPERM: a security policy forbids the call",
    errno.EACCES: "EACCES: a security policy forbids the call",
    errno.ENOSYS: "ENOSYS: a security policy forbids the call",
}


def return_rows(regions: Sequence[tuple[int, int, int]], runs: Iterable[tuple[int, int]]) -> tuple[int, str]:
    """Return the memory of ``runs`` of rows to the operating system; they read as zeros from now on.

    ``regions`` are those of ``kvcached.memory.regions.Region``; ``runs`` must not be adjacent to each other, because a
    page that two runs share is kept. Returns the bytes whose memory is back, and why the rest is not: ``""`` where only
    the parts of pages at the ends of runs are missing. After the first refusal the rest of that region is left alone.
    """
    returned: list[int] = []
    reason = call_guarded(name_error, advise_regions, regions, runs, returned)
    return sum(returned), reason


def advise_regions(
    regions: Sequence[tuple[int, int, int]], runs: Iterable[tuple[int, int]], returned: list[int]
) -> str:
    """Return the memory of ``runs`` in all regions and put the bytes of each in ``returned``; the first refusal."""
    pieces = list(runs)
    libc = ctypes.CDLL(None, use_errno=True)
    reason = ""
    for region in regions:
        given, refusal = advise_region(libc, region, pieces)
        returned.append(given)
        reason = reason or refusal
    return reason


def advise_region(libc: ctypes.CDLL, region: tuple[int, int, int], runs: Sequence[tuple[int, int]]) -> tuple[int, str]:
    """Return the memory of ``runs`` in one region: bytes, and the reason for stopping early."""
    returned = 0
    for start, stop in pages_inside(region, runs, PAGE_BYTES):
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_DONTNEED) != 0:
            number = ctypes.get_errno()
            return returned, f"madvise: {EXPLANATIONS.get(number, errno.errorcode.get(number, str(number)))}"
        returned += stop - start
    return returned, ""


def pages_inside(
    region: tuple[int, int, int], runs: Iterable[tuple[int, int]], page_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of the whole pages inside each of ``runs``: rounded inward, empty ones left out.

    Raises ValueError for rows that the region does not have, whose addresses would belong to somebody else.
    """
    address, row_bytes, rows = region
    for first, end in runs:
        if not 0 <= first <= end <= rows:
            message = f"rows {first} to {end} are not among the region's {rows}"
            raise ValueError(message)
        start = address + first * row_bytes
        start += -start % page_bytes
        stop = address + end * row_bytes
        stop -= stop % page_bytes
        if stop > start:
            yield start, stop


def prepare(regions: Sequence[tuple[int, int, int]]) -> str:
    """Get ``regions`` ready for returns and return why they cannot be returned, ``""`` if they can.

    Reads smaps once (about 20 ms at 2 GB): call it when the engine is brought under control, never later. Where huge
    pages are possible, the regions are told to do without from now on: a huge page of which a part is returned keeps
    its whole memory until the machine is short of it.
    """
    return call_guarded(name_obstacle, get_ready, regions)


def get_ready(regions: Sequence[tuple[int, int, int]]) -> str:
    """Do what :func:`prepare` does; may raise."""
    obstacle = find_obstacle(regions)
    if not obstacle:
        avoid_huge_pages(regions)
    return obstacle


def find_obstacle(regions: Sequence[tuple[int, int, int]]) -> str:
    """Return what stands against returning the memory of ``regions``, ``""`` if nothing does."""
    if not regions:
        return "it has no KV tensors in main memory"
    spans = [(address, address + row_bytes * rows) for address, row_bytes, rows in regions]
    reached = False
    flags: set[str] = set()
    with open(SMAPS, encoding="ascii", errors="replace") as lines:
        for line in lines:
            head = line.split(None, 1)[0]
            if "-" in head and not head.endswith(":"):
                low, high = (int(number, 16) for number in head.split("-"))
                reached = any(low < stop and start < high for start, stop in spans)
            elif reached and head == "VmFlags:":
                flags.update(line.split()[1:])
    for flag, obstacle in OBSTACLES.items():
        if flag in flags:
            return obstacle
    return "" if flags else "its memory is not mapped in this process"


def avoid_huge_pages(regions: Sequence[tuple[int, int, int]]) -> None:
    """Let ``regions`` be backed by small pages from the next page fault on."""
    if not os.path.exists(HUGE_PAGE_SETTING):
        return
    with open(HUGE_PAGE_SETTING, encoding="ascii") as setting:
        if "[never]" in setting.read():
            return
    libc = ctypes.CDLL(None, use_errno=True)
    for region in regions:
        for start, stop in pages_inside(region, [(0, region[2])], PAGE_BYTES):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_NOHUGEPAGE)


def name_error(error: Exception) -> str:
    """Return a reason for memory that is not returned because of ``error``."""
    return f"{type(error).__name__}: {error}"


def name_obstacle(error: Exception) -> str:
    """Return an obstacle to all returns, because of ``error``."""
    return f"its memory cannot be looked at ({name_error(error)})"
