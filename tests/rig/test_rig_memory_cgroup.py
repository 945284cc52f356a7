"""Two engines in a memory cgroup that is smaller than their pools together: caps keep the kernel from killing one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.memory_cgroup import MemoryCgroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Engine, Engines

CAPACITY = 131_072
TOKEN_BYTES = 2048
POOL_BYTES = CAPACITY * TOKEN_BYTES
QUARTER, THREE_QUARTERS = CAPACITY // 4, CAPACITY // 4 * 3
LOAD = ("--requests", "1000000", "--capacity-tokens", str(CAPACITY), "--token-bytes", str(TOKEN_BYTES))
ROUNDS = 4


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    """Return a cgroup that is removed once the engines in it have ended."""
    group = MemoryCgroup()
    yield group
    group.remove()


@pytest.fixture
def pair(group: MemoryCgroup, engines: Engines) -> Iterator[list[Engine]]:
    """Return two engines in the group, under a load that fills whatever they may hold; each began with a low cap."""
    sides = [engines.within(name, group.starter) for name in ("left", "right")]
    try:
        yield [side.start(*LOAD, KVCACHED_MAX_KV_TOKENS=str(QUARTER)) for side in sides]
    finally:
        for side in sides:
            side.stop()


def resident_bytes(engine: Engine) -> int:
    """Return how much of the engine's pool holds memory."""
    return engine.status().replicas[0].resident_bytes


def test_engines_whose_caps_move_in_the_right_order_are_not_killed_and_without_caps_one_is(
    group: MemoryCgroup, pair: list[Engine]
) -> None:
    """Whoever gives lowers its cap and waits, then the other raises its own: both pools are filled in turns."""
    left, right = pair
    for engine in pair:
        engine.wait_for(lambda engine=engine: resident_bytes(engine) <= 0.26 * POOL_BYTES, "return of the pool")
    beside = group.anonymous_bytes() - resident_bytes(left) - resident_bytes(right)
    group.bound(beside + int(1.3 * POOL_BYTES))
    for number in range(ROUNDS):
        giver, taker = (left, right) if number % 2 else (right, left)
        assert giver.cap(QUARTER).applied
        assert taker.cap(THREE_QUARTERS).applied
        taker.wait_for(lambda taker=taker: resident_bytes(taker) > 0.7 * POOL_BYTES, "use of the memory that was given")
    assert (group.kills(), left.process.poll(), right.process.poll()) == (0, None, None)
    for engine in pair:
        engine.cap(-1, wait=None)
    left.wait_for(lambda: group.kills() > 0, "kill by the kernel")
