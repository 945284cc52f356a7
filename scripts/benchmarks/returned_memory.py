"""Measures what returning memory costs: the hold of one step, a GiB, taking it again, and a step with nothing to do.

All figures are processor time of the one thread that does it, since these machines are shared.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import statistics
import time
import timeit
from typing import TYPE_CHECKING

from kvcached.memory.elastic import Elastic
from kvcached.memory.madvise import prepare
from kvcached.memory.pool_memory import PoolMemory
from kvcached.memory.regions import PoolShape, Region
from kvcached.memory.returning import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Iterable

GIB = 1 << 30
LAYERS = 4
ROW_BYTES = 128 << 10
"""Of one block of 32 tokens in one layer: 8 KV heads of 128 in bfloat16, as in a Llama of 8 billion parameters."""

ROWS = GIB // LAYERS // ROW_BYTES
ROUNDS = 5


class IdleEngine:
    """A pool without requests, all of which is returned already."""

    def free_rows(self) -> int:
        """Return that all rows are free."""
        return ROWS

    def active_rows(self) -> int:
        """Return that none is in use."""
        return 0

    def withheld_rows(self) -> int:
        """Return that none is withheld."""
        return 0

    def rows_after(self, keep: int) -> Iterable[int]:
        """Return all rows but the first ones."""
        return range(keep, ROWS)


def make_pool() -> tuple[mmap.mmap, int, list[Region]]:
    """Map a pool of a GiB in four layers, none of it resident."""
    memory = mmap.mmap(-1, GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    regions = [Region(address + layer * ROWS * ROW_BYTES, ROW_BYTES, ROWS) for layer in range(LAYERS)]
    return memory, address, regions


def give_back(regions: list[Region], rows: Iterable[int]) -> tuple[float, list[float]]:
    """Return ``rows`` step by step; return the GiB that came back and the seconds of each step."""
    memory = PoolMemory(PoolShape(ROWS, LAYERS * ROW_BYTES, LAYERS), LocalTransport(regions), prepare(regions))
    holds = []
    began = time.thread_time()
    memory.offer(rows)
    holds.append(time.thread_time() - began)
    while memory.busy:
        began = time.thread_time()
        memory.advance()
        holds.append(time.thread_time() - began)
    return memory.figures().returned_bytes / GIB, holds


def bench_returning() -> None:
    """Measure a GiB in one run and in runs of one row, and what it takes to write it again."""
    _memory, address, regions = make_pool()
    writes, again, together, apart = [], [], [], []
    for _ in range(ROUNDS):
        began = time.thread_time()
        ctypes.memset(address, 1, GIB)
        writes.append(time.thread_time() - began)
        began = time.thread_time()
        ctypes.memset(address, 2, GIB)
        again.append(time.thread_time() - began)
        together.append(give_back(regions, range(ROWS)))
        ctypes.memset(address, 1, GIB)
        apart.append(give_back(regions, range(0, ROWS, 2)))
    refault = statistics.median(writes) - statistics.median(again)
    print(f"writing a GiB that was returned - writing it while it is resident: {refault * 1e3:.0f} ms")
    for name, runs in (("one run", together), ("every second row", apart)):
        per_gib = statistics.median(sum(holds) / gib for gib, holds in runs)
        longest = statistics.median(max(holds) for _, holds in runs)
        cost = f"{per_gib * 1e3:.0f} ms per GiB (aim <= 200), longest step {longest * 1e3:.1f} ms (aim <= 5)"
        print(f"returning {name}: {cost}")


def bench_steps() -> None:
    """Measure what steps cost that return nothing."""
    memory = PoolMemory(PoolShape(ROWS, LAYERS * ROW_BYTES, LAYERS), None, "a bench")
    elastic = Elastic(memory, IdleEngine(), 5.0, time.monotonic())
    step = functools.partial(elastic.on_step, 0.0)
    idle = min(timeit.repeat(step, number=100_000, repeat=ROUNDS, timer=time.thread_time)) * 1e4
    rows = list(range(32))
    taking = (
        min(timeit.repeat(lambda: memory.take(rows), number=10_000, repeat=ROUNDS, timer=time.thread_time)) / 32 * 1e5
    )
    print(
        f"a step of elastic memory with nothing to do: {idle:.0f} ns; noting a row that a request gets: {taking:.0f} ns"
    )


if __name__ == "__main__":
    bench_returning()
    bench_steps()
