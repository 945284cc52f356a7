"""Memory that nobody may touch once it is returned: a stray read or write kills the rank instead of going unseen."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

from kvcached.memory.madvise import pages_inside
from kvcached.memory.pool_memory import PoolMemory
from kvcached.memory.regions import covering_pages, runs_of
from kvcached.rig.group_transport import GroupTransport

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcached.memory.regions import PoolShape, Region, Run

_PROT_NONE = 0


class GuardedTransport(GroupTransport):
    """Returns memory and takes the right to access it away."""

    def __init__(self, region: Region, ranks: int) -> None:
        super().__init__([region], ranks)
        self._region = region

    def send(self, runs: list[Run]) -> None:
        """Return the memory of ``runs`` and forbid every access to it."""
        super().send(runs)
        for span in pages_inside(self._region, runs, mmap.PAGESIZE):
            _protect(span, _PROT_NONE)

    def reopen(self, runs: list[Run]) -> None:
        """Allow access to all pages that hold a byte of ``runs``."""
        for run in runs:
            _protect(covering_pages(self._region, run, mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE)


class GuardedMemory(PoolMemory):
    """A pool's memory in which returned rows are out of bounds until requests get them."""

    def __init__(self, shape: PoolShape, transport: GuardedTransport, obstacle: str = "") -> None:
        super().__init__(shape, transport, obstacle)
        self._guard = transport

    def take(self, rows: Collection[int]) -> None:
        """Note that requests get ``rows``, and let them be accessed again."""
        self._guard.reopen(runs_of(row for row in rows if self.is_returned(row)))
        super().take(rows)


def _protect(span: Run, protection: int) -> None:
    start, stop = span
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), protection) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "mprotect")
