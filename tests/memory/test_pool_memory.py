"""Offered rows give their memory back in pieces, taken rows are left alone, and the count says what really happened."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvcached.memory import pool_memory
from kvcached.memory.kernel_figures import resident_bytes
from kvcached.memory.pool_memory import PoolMemory
from kvcached.memory.regions import PoolShape, rows_in
from kvcached.memory.returning import LocalTransport, Returned

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Mapping

    from kvcached.memory.regions import Run

MIB = 1 << 20
ROW = 128 << 10


class SlowTransport:
    """Answers when it is told to, as workers behind a queue do."""

    def __init__(self) -> None:
        self.sent: list[list[Run]] = []
        self.ready: list[Returned] = []

    def send(self, runs: list[Run]) -> None:
        self.sent.append(runs)

    def replies(self) -> list[Returned]:
        ready, self.ready = self.ready, []
        return ready


def finish(memory: PoolMemory) -> int:
    steps = 0
    while memory.busy:
        memory.advance()
        steps += 1
    return steps


def test_offered_rows_are_returned_and_counted(mapped: Callable[[int], Mapping]) -> None:
    """The figures agree with the kernel's count of the pool's pages, but for the ends of runs."""
    region = mapped(64 * MIB).region(ROW, offset=64)
    memory = PoolMemory(PoolShape(region.rows, ROW), LocalTransport([region]))
    assert memory.figures() == (region.rows * ROW, 0, "yes")
    memory.offer(range(100, 300))
    finish(memory)
    figures = memory.figures()
    assert resident_bytes([region]) == pytest.approx(figures.resident_bytes, abs=2 * 4096)
    memory.take(range(100, 150))
    assert memory.figures().returned_bytes == pytest.approx(150 * ROW, abs=4096)


def test_one_step_returns_a_bounded_piece() -> None:
    """A large offer goes in several steps, and rows that lie apart count for more than those that lie together."""
    sent = []
    for rows in (range(10_000), range(0, 20_000, 2)):
        transport = SlowTransport()
        memory = PoolMemory(PoolShape(100_000, 64 << 10), transport)
        memory.offer(rows)
        memory.advance()
        sent.append(rows_in(transport.sent[0]))
    assert 0.9 * pool_memory.PIECE_BYTES <= sent[0] * (64 << 10) <= pool_memory.PIECE_BYTES
    assert sent[1] * 2 < sent[0]


def test_a_row_that_is_taken_before_its_turn_is_not_sent() -> None:
    """What a request got after the offer is never given away under it."""
    transport = SlowTransport()
    memory = PoolMemory(PoolShape(100, ROW), transport)
    memory.offer(range(10, 20))
    memory.take([12, 13])
    memory.advance()
    assert transport.sent == [[(10, 12), (14, 20)]]


def test_next_piece_waits_for_the_answer_to_the_last() -> None:
    """Workers that are slow are not flooded, and what they have not answered is not said to be returned."""
    transport = SlowTransport()
    memory = PoolMemory(PoolShape(100, ROW), transport)
    memory.offer([1])
    memory.advance()
    memory.offer([2])
    memory.advance()
    assert (transport.sent, memory.busy, memory.figures().returned_bytes) == ([[(1, 2)]], True, 0)
    transport.ready.append(Returned(ROW, ""))
    memory.advance()
    assert (len(transport.sent), memory.figures().returned_bytes) == (2, ROW)


def test_a_refusal_is_told_and_ends_all_returning(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is tried again in a loop; the figures say that nothing came back and why."""
    transport = SlowTransport()
    memory = PoolMemory(PoolShape(1000, 32 * MIB), transport)
    memory.offer(range(10))
    memory.advance()
    transport.ready.append(Returned(0, "madvise: EINVAL"))
    memory.advance()
    assert (memory.busy, memory.can_return) == (False, False)
    memory.offer(range(100))
    memory.advance()
    assert len(transport.sent) == 1
    assert memory.figures() == (1000 * 32 * MIB, 0, "madvise: EINVAL")
    assert len(caplog.records) == 1


def test_partial_return_is_counted_by_what_came_back() -> None:
    """One rank of two that refuses shows in the bytes and in the text, and the rest goes on."""
    transport = SlowTransport()
    memory = PoolMemory(PoolShape(100, MIB, ranks=2), transport)
    memory.offer(range(10))
    memory.advance()
    transport.ready.append(Returned(10 * MIB, "rank 1: madvise: EINVAL"))
    memory.advance()
    assert memory.figures() == (200 * MIB, 10 * MIB, "rank 1: madvise: EINVAL")
    memory.take(range(5))
    assert memory.figures().returned_bytes == 5 * MIB
    assert memory.can_return


def test_an_obstacle_found_at_bind_keeps_everything() -> None:
    """Where memory cannot be returned nothing is sent, nothing is waited for, and the reason is shown."""
    memory = PoolMemory(PoolShape(100, ROW), None, "its memory is on a GPU")
    memory.offer(range(100))
    memory.advance()
    assert (memory.busy, memory.follows_taking) == (False, False)
    assert memory.figures() == (100 * ROW, 0, "its memory is on a GPU")


@pytest.mark.parametrize("seed", range(5))
def test_random_offers_and_takes_never_wipe_a_row_in_use(mapped: Callable[[int], Mapping], seed: int) -> None:
    """Rows in use keep what was written into them, whatever is offered, sent and taken in whatever order."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    row_bytes = dice.choice([100, 2048, 4096, 5000])
    mapping = mapped(MIB)
    region = mapping.region(row_bytes, offset=dice.choice([0, 64]))
    memory = PoolMemory(PoolShape(region.rows, row_bytes), LocalTransport([region]))
    start = region.address - mapping.address
    free, used = set(range(region.rows)), {}
    for step in range(400):
        if free and dice.random() < 0.5:
            rows = dice.sample(sorted(free), min(len(free), dice.randrange(1, 40)))
            free -= set(rows)
            memory.take(rows)
            for row in rows:
                used[row] = bytes([step % 255 + 1]) * row_bytes
                mapping.memory[start + row * row_bytes : start + (row + 1) * row_bytes] = used[row]
        elif used:
            for row in dice.sample(sorted(used), min(len(used), dice.randrange(1, 40))):
                del used[row]
                free.add(row)
        if dice.random() < 0.4:
            memory.offer(dice.sample(sorted(free), dice.randrange(len(free) + 1)))
        memory.advance()
        row = dice.choice(sorted(used)) if used else None
        if row is not None:
            assert mapping.memory[start + row * row_bytes : start + (row + 1) * row_bytes] == used[row]
    for row, content in used.items():
        assert mapping.memory[start + row * row_bytes : start + (row + 1) * row_bytes] == content
    assert 0 <= memory.figures().returned_bytes <= memory.figures().pool_bytes
