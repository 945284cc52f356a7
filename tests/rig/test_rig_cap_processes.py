"""Caps and elastic memory in real ranks: what the kernel says of each process, and that no rank differs."""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvcached.memory.kernel_figures import anonymous_bytes, minor_faults
from kvcached.values import Outcome

if TYPE_CHECKING:
    from conftest import Engine, Engines

CAPACITY = 131_072
TOKEN_BYTES = 1024
POOL_BYTES = CAPACITY * TOKEN_BYTES
SIZES = ("--capacity-tokens", str(CAPACITY), "--token-bytes", str(TOKEN_BYTES))
REQUESTS = int(os.environ.get("KVCACHED_TEST_REQUESTS", "300"))
"""Of the load under random caps and limits; set it for a long run."""


def assert_ranks_held_the_same(report: dict[str, Any]) -> None:
    """Fail unless all ranks did and held the same at every step, caps included."""
    first = report["ranks"][0]
    for rank in report["ranks"]:
        assert rank["digest"] == first["digest"]
        assert rank["limit_breaches"] == 0
        for key in ("step", "revision", "cap_tokens", "withheld_tokens_after"):
            assert [one[key] for one in rank["caps"]] == [one[key] for one in first["caps"]]


def wait_for_end_of_load(engine: Engine) -> None:
    """Wait until the load has come and gone; an engine that has not begun yet reports no active tokens either."""

    def is_over() -> bool:
        replica = engine.status().replicas[0]
        return replica.idle_tokens > 0 and replica.active_tokens == 0

    engine.wait_for(is_over, "end of the load")


def anonymous_of(engine: Engine) -> list[int]:
    return [anonymous_bytes(pid) for pid in engine.rank_pids()]


@pytest.mark.parametrize("ranks", [2, 4])
def test_cap_to_a_quarter_gives_the_memory_back_on_every_rank(engines: Engines, ranks: int) -> None:
    """Each process's anonymous pages fall by at least 95 % of what is said to be returned; a raise takes it again."""
    engine = engines.start("--tp", str(ranks), "--requests", "300", *SIZES, "--linger", "300")
    wait_for_end_of_load(engine)
    before = anonymous_of(engine)
    result = engine.cap(CAPACITY // 4)
    assert result.applied
    fallen = [old - new for old, new in zip(before, anonymous_of(engine), strict=True)]
    replica = engine.status().replicas[0]
    assert replica.returned_bytes == pytest.approx(0.75 * POOL_BYTES * ranks, rel=0.01)
    assert replica.pool_bytes == POOL_BYTES * ranks
    assert all(one >= 0.95 * replica.returned_bytes / ranks for one in fallen), (fallen, replica.returned_bytes)
    assert engine.cap(-1).applied
    report = engine.finish(interrupt=True)
    assert_ranks_held_the_same(report)
    assert [one["complete"] for one in report["ranks"][-1]["caps"]] == [True, True]
    assert report["ranks"][-1]["caps"][0]["returned_bytes_after"] == pytest.approx(0.75 * POOL_BYTES, rel=0.01)


def test_random_caps_and_limits_from_other_processes_leave_all_ranks_equal(engines: Engines) -> None:
    """Under load, with a guard that kills at a touch of returned memory, all requests end and all hits are right."""
    # Few bytes a token: a block is a page, and what the kernel fills again after each cap costs little.
    sizes = ("--capacity-tokens", str(CAPACITY), "--token-bytes", "256")
    engine = engines.start("--tp", "2", "--requests", str(REQUESTS), *sizes, "--guard-returned")
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    dice = random.Random(seed)
    while engine.process.poll() is None:
        tokens = dice.choice((-1, 0, dice.randrange(22_000, CAPACITY)))
        dice.choice((engine.cap, engine.publish))(tokens, wait=None)
        time.sleep(dice.random() * 0.03)
    report = engine.finish()
    assert_ranks_held_the_same(report)
    assert report["requests"] == REQUESTS
    assert len(report["ranks"][0]["caps"]) >= 3
    assert len(report["ranks"][0]["updates"]) >= 3


def test_cap_below_the_longest_request_is_rejected_with_the_number(engines: Engines) -> None:
    """Who publishes it is told what is the least, and the engine keeps its whole pool."""
    engine = engines.start("--requests", "0", *SIZES, "--linger", "100")
    engine.cap(16)
    cap = engine.status().replicas[0].cap
    assert (cap.outcome, cap.applied.limit_tokens) == (Outcome.REJECTED_BELOW_FLOOR, -1)
    assert "20480" in cap.reason
    report = engine.finish(interrupt=True)
    assert report["ranks"][0]["withheld_tokens"] == 0


def test_startup_cap_holds_from_the_first_request(engines: Engines) -> None:
    """An engine that starts with a cap never holds more, and its memory is back before the load ends."""
    cap = str(CAPACITY // 2)
    engine = engines.start("--tp", "2", "--requests", "200", *SIZES, KVCACHED_MAX_KV_TOKENS=cap)
    report = engine.finish()
    assert_ranks_held_the_same(report)
    for rank in report["ranks"]:
        assert (rank["final_cap_tokens"], rank["final_cap_outcome"]) == (CAPACITY // 2, "startup")
        assert rank["max_held_tokens"] <= CAPACITY // 2
        assert rank["returned_bytes"] == pytest.approx(POOL_BYTES / 2, rel=0.01)


def test_idle_elastic_engine_holds_what_it_retains_and_no_more(engines: Engines) -> None:
    """After the load and a limit of none, at least 95 % of the pool is back with the kernel; then nobody is woken."""
    elastic = {"KVCACHED_ELASTIC": "1", "KVCACHED_ELASTIC_AFTER": "0.5"}
    engine = engines.start("--tp", "2", "--requests", "300", *SIZES, "--linger", "300", **elastic)
    wait_for_end_of_load(engine)
    before = anonymous_of(engine)
    resident = engine.status().replicas[0].resident_bytes / 2
    assert engine.publish(0).applied
    engine.wait_for(lambda: engine.status().replicas[0].returned_bytes >= 0.99 * 2 * POOL_BYTES, "return of the pool")
    time.sleep(0.2)
    fallen = [old - new for old, new in zip(before, anonymous_of(engine), strict=True)]
    assert all(one >= 0.95 * resident for one in fallen), (fallen, resident)
    faults = [minor_faults(pid) for pid in engine.rank_pids()]
    time.sleep(1)
    assert [minor_faults(pid) for pid in engine.rank_pids()] == pytest.approx(faults, abs=200)
    assert_ranks_held_the_same(engine.finish(interrupt=True))
