"""Rows that nobody needs for a while give their memory back, and a steady load never meets a returned one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvcached.memory.elastic import Elastic
from kvcached.memory.pool_memory import PoolMemory
from kvcached.memory.regions import PoolShape, rows_in
from kvcached.memory.returning import Returned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.memory.regions import Run

AFTER_S = 4.0
ROWS = 20_000


class InstantTransport:
    """Says that all was returned."""

    def __init__(self) -> None:
        self.rows = 0
        self._ready: list[Returned] = []

    def send(self, runs: list[Run]) -> None:
        self.rows += rows_in(runs)
        self._ready.append(Returned(rows_in(runs) * 4096, ""))

    def replies(self) -> list[Returned]:
        ready, self._ready = self._ready, []
        return ready


class StackPool:
    """A pool that hands out first what was freed last, and counts the returned rows among them as faults."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows
        self.stack = list(range(rows))
        self.transport = InstantTransport()
        self.memory = PoolMemory(PoolShape(rows, 4096), self.transport)
        self.elastic = Elastic(self.memory, self, AFTER_S, 0.0)
        self.now = 0.0
        self.faults = 0
        self.cached = 0

    def free_rows(self) -> int:
        return len(self.stack)

    def active_rows(self) -> int:
        return self.rows - len(self.stack) - self.cached

    def withheld_rows(self) -> int:
        return 0

    def rows_after(self, keep: int) -> Iterator[int]:
        return iter(self.stack[: len(self.stack) - keep])

    def allocate(self, rows: int) -> list[int]:
        taken = [self.stack.pop() for _ in range(rows)]
        gone = self.memory.gone_rows
        self.memory.take(taken)
        self.faults += gone - self.memory.gone_rows
        return taken

    def step(self, step_s: float) -> None:
        self.now += step_s
        self.elastic.on_step(self.now)
        self.memory.advance()

    def run(self, seconds: float, step_s: float = 0.1) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step(step_s)

    def sleep(self) -> int:
        """Do as an idle engine does: call at ``wake_at`` alone; return how many calls that took."""
        calls = 0
        while (wake_at := self.elastic.wake_at) is not None or self.memory.busy:
            self.now = max(self.now, wake_at or 0.0)
            self.elastic.on_step(self.now)
            self.memory.advance()
            calls += 1
            assert calls < 1000
        return calls

    @property
    def returned_rows(self) -> int:
        return self.memory.figures().returned_bytes // 4096


def test_an_engine_that_was_never_used_gives_all_of_its_memory_back_once() -> None:
    """A pool is resident from its start; after the time it is not, and then an idle engine sleeps for good."""
    pool = StackPool()
    pool.run(AFTER_S * 0.9)
    assert pool.returned_rows == 0
    pool.sleep()
    assert pool.returned_rows == ROWS
    assert pool.now <= 1.5 * AFTER_S
    assert pool.elastic.wake_at is None


@pytest.mark.parametrize("seed", range(5))
def test_steady_load_takes_no_returned_row(seed: int) -> None:
    """With 30 % of the pool in use at most, what comes and goes is never returned, and the rest is."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    pool = StackPool()
    held: list[list[int]] = []
    faults = 0
    for turn in range(2000):
        while sum(map(len, held)) < 0.3 * ROWS:
            held.append(pool.allocate(dice.randrange(1, 400)))
        if turn == 1000:
            faults = pool.faults
        pool.run(0.1, 0.05)
        for _ in range(dice.randrange(4)):
            pool.stack += held.pop(dice.randrange(len(held)))
    assert pool.faults == faults
    assert pool.returned_rows >= 0.55 * ROWS


def test_rows_that_become_free_are_returned_after_the_time() -> None:
    """What a dropped limit frees follows, though it was free before for a moment only."""
    pool = StackPool()
    held = pool.allocate(8000)
    pool.run(3 * AFTER_S)
    assert pool.returned_rows == ROWS - 10000  # a quarter more than requests hold
    pool.stack += held
    pool.run(AFTER_S * 0.7)
    assert pool.returned_rows == ROWS - 10000
    pool.run(AFTER_S)
    assert pool.returned_rows == ROWS


def test_requests_that_come_and_go_between_two_steps_keep_their_rows() -> None:
    """Rows that were taken lately stay, also where the count of free ones never showed that they were in use."""
    pool = StackPool()
    pool.run(3 * AFTER_S)
    for _ in range(int(4 * AFTER_S / 0.1)):
        pool.stack += pool.allocate(500)[::-1]
        pool.run(0.1)
    returned = pool.transport.rows
    for _ in range(int(4 * AFTER_S / 0.1)):
        pool.stack += pool.allocate(500)[::-1]
        pool.run(0.1)
    assert pool.transport.rows == returned
    assert pool.returned_rows == ROWS - 500


@pytest.mark.parametrize("step_s", [AFTER_S / 2, AFTER_S, 3 * AFTER_S])
def test_steps_longer_than_the_time_do_not_make_a_busy_engine_idle(step_s: float) -> None:
    """Requests that follow each other at once keep their rows and the margin, however long one step of theirs takes."""
    pool = StackPool(2000)
    pool.sleep()
    for turn in range(40):
        first = pool.allocate(400)
        pool.step(step_s)
        second = pool.allocate(30)
        pool.step(0.1)
        pool.stack += second + first
        pool.step(0.0)
        if turn == 20:
            before = pool.faults
    assert pool.faults == before == 430
    assert pool.returned_rows == 2000 - 430


def test_rows_that_requests_need_within_one_step_only_are_kept_as_those_of_longer_requests() -> None:
    """A peak that no step ever ends with is remembered while requests run, for longer than a row stays unused."""
    pool = StackPool()
    pool.sleep()
    for turn in range(400):
        peak = turn % int(3 * AFTER_S / 0.1) == 0
        pool.stack += pool.allocate(900 if peak else 50)[::-1]
        pool.step(0.1)
    assert pool.faults == 900
    pool.sleep()
    assert pool.returned_rows == ROWS


def test_idle_engine_wakes_a_bounded_number_of_times() -> None:
    """An idle engine is woken a few times until its memory is back, then never again until there is work."""
    pool = StackPool()
    assert pool.sleep() < 20
    pool.stack += pool.allocate(100)
    pool.elastic.on_step(pool.now)
    assert pool.elastic.wake_at is not None
    assert pool.sleep() < 20
    assert pool.returned_rows == ROWS


def test_rows_that_become_free_while_an_engine_sleeps_wake_it() -> None:
    """A limit that drops on an idle engine frees rows in a step of its own, and their memory follows."""
    pool = StackPool()
    rows = pool.allocate(ROWS // 2)
    pool.run(3 * AFTER_S)
    pool.cached = len(rows)
    pool.sleep()
    assert (pool.elastic.wake_at, pool.returned_rows) == (None, ROWS // 2)
    pool.stack += rows
    pool.cached = 0
    assert pool.elastic.wake_at is not None
    pool.sleep()
    assert pool.returned_rows == ROWS


def test_engine_that_holds_requests_without_stepping_is_not_woken_for_ever() -> None:
    """Requests that are paused keep their rows and the margin for their peak, and nobody is woken for them."""
    pool = StackPool()
    pool.allocate(1000)
    pool.run(AFTER_S)
    assert pool.sleep() < 100
    assert pool.returned_rows == ROWS - 1250


def test_memory_that_cannot_be_returned_wakes_nobody() -> None:
    """With an obstacle there is nothing to do, ever."""
    pool = StackPool()
    pool.memory = PoolMemory(PoolShape(ROWS, 4096), None, "its memory is on a GPU")
    assert Elastic(pool.memory, pool, AFTER_S, 0.0).wake_at is None
