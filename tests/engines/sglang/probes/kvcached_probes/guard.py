"""Makes memory that was returned unreadable until its rows are given to a request: any touch in between is a SIGSEGV.

Records how many rows were guarded. The mistake that would go unnoticed without it: a row read or written while free.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Any

from kvcached.memory.madvise import pages_inside
from kvcached.memory.regions import covering_pages, rows_in, runs_of
from kvcached_probes.places import folder, hook_after, hook_around

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.memory.regions import Region, Run

PROT_NONE, PROT_BOTH = 0, mmap.PROT_READ | mmap.PROT_WRITE


class Guard:
    """The guard of this process's pool."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._regions: list[Region] = []
        self._record = folder() / f"guarded-{os.getpid()}"

    def note(self, _result: object, _transport: object, regions: list[Region], *_: object) -> None:
        """Remember where the pool lies."""
        self._regions = list(regions)

    def close(self, _result: object, _transport: object, runs: list[Run]) -> None:
        """Make the whole pages of ``runs`` unreadable, after they were returned."""
        for region in self._regions:
            for start, stop in pages_inside(region, runs, mmap.PAGESIZE):
                self._protect(start, stop, PROT_NONE)
        with self._record.open("a") as record:
            record.write(f"{rows_in(runs)}\n")

    def open(self, take: Callable[..., None], memory: Any, rows: Any) -> None:  # noqa: ANN401 - PoolMemory
        """Make the pages of ``rows`` usable again, before a request writes them."""
        rows = list(rows)
        take(memory, rows)
        for region in self._regions:
            for run in runs_of(rows):
                self._protect(*covering_pages(region, run, mmap.PAGESIZE), PROT_BOTH)

    def _protect(self, start: int, stop: int, protection: int) -> None:
        if self._libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), protection) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def install() -> None:
    """Guard this process's pool."""
    guard = Guard()
    hook_after("kvcached.memory.returning.LocalTransport.__init__", guard.note)
    hook_after("kvcached.memory.returning.LocalTransport.send", guard.close)
    hook_around("kvcached.memory.pool_memory.PoolMemory.take", guard.open)
