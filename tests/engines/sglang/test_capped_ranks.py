"""Caps in the hooks, iteration by iteration, on SGLang's real trees and allocators of two ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sglang_caches import Cached, build
from sglang_placed import INSTANCE, LONGEST, Placed, declare, place, scheduler_of, take_place
from sglang_server import wait_until
from torch.distributed import HashStore

from kvcached.control import get_instances, set_kv_capacity_limit
from kvcached.engines.sglang.kv_memory import PIPELINE_OBSTACLE
from kvcached.engines.sglang.rank_messages import Startup
from kvcached.values import Bound, Outcome, Update

if TYPE_CHECKING:
    from pathlib import Path

    from kvcached.ledger.instances import ReplicaStatus

SIZE = 16384
CAP = 4000
ITERATIONS = 12
"""More than enough to take the pool out in chunks."""


def pool_of(placed: Placed) -> Any:  # noqa: ANN401 - SGLang's allocator
    """Return the allocator."""
    return placed.scheduler.token_to_kv_pool_allocator


def run_idle(placed: Placed, iterations: int = ITERATIONS) -> None:
    """Run idle iterations."""
    for _ in range(iterations):
        placed.iterate()


def said(ledger_dir: Path) -> ReplicaStatus:
    """Return what the replica reports."""
    return get_instances(ledger_dir)[0].replicas[0]


def cap_to(placed: Placed, tokens: int, ledger_dir: Path) -> None:
    """Publish a cap, and iterate until the source rank has read it and done what it can."""
    result = set_kv_capacity_limit(tokens, instance_name=INSTANCE, ledger_dir=ledger_dir)
    assert result.accepted, result
    wait_until(lambda: Update(result.revision, tokens, Bound.CAP) in placed.iterate(), 20, "the cap is announced")
    run_idle(placed)


def fill(cached: Cached, leaves: int) -> None:
    """Cache that many leaves of 100 idle tokens."""
    for leaf in range(leaves):
        cached.insert([leaf * 1000 + step for step in range(100)])


@pytest.fixture(params=["unified-rust", "unified-python"])
def cached(request: pytest.FixtureRequest) -> Cached:
    """Return an empty cache."""
    try:
        return build(request.param, size=SIZE)
    except Exception as error:  # noqa: BLE001 - whatever this release lacks
        pytest.skip(str(error))


def test_a_cap_takes_free_slots_first_and_idle_ones_for_the_rest(cached: Cached, tmp_path: Path) -> None:
    """The pool shrinks to the cap, whatever was cached above it is evicted, and a raise gives all of it back."""
    placed = place(cached, tmp_path)
    run_idle(placed, 2)
    fill(cached, 100)
    cap_to(placed, CAP, tmp_path)
    assert said(tmp_path).cap.outcome is Outcome.APPLIED
    assert CAP - 100 <= cached.tree_cache.evictable_size() <= CAP
    assert pool_of(placed).available_size() + cached.tree_cache.evictable_size() == CAP
    assert placed.scheduler.invariant_checker.max_total_num_tokens == CAP
    assert (said(tmp_path).active_tokens, said(tmp_path).capacity_tokens) == (0, SIZE)
    cap_to(placed, -1, tmp_path)
    assert placed.scheduler.invariant_checker.max_total_num_tokens == SIZE
    assert pool_of(placed).available_size() + cached.tree_cache.evictable_size() == SIZE


def test_a_cap_waits_for_what_requests_hold_and_for_a_prompt_in_chunks(cached: Cached, tmp_path: Path) -> None:
    """Slots come out as requests end; room for the rest of a prompt that was begun with is left alone."""
    placed = place(cached, tmp_path)
    run_idle(placed, 2)
    held = pool_of(placed).alloc(SIZE - 2000)
    placed.scheduler.chunked_req = SimpleNamespace(origin_input_ids=[1] * 1500, output_ids=[])
    cap_to(placed, CAP, tmp_path)
    assert said(tmp_path).cap.outcome is Outcome.APPLYING
    assert pool_of(placed).available_size() >= 1500
    placed.scheduler.chunked_req = None
    pool_of(placed).free(held)
    placed.hooks.release()
    run_idle(placed)
    assert said(tmp_path).cap.outcome is Outcome.APPLIED
    assert pool_of(placed).available_size() == CAP


def test_a_flush_of_the_engines_own_succeeds_and_the_cap_holds_again(cached: Cached, tmp_path: Path) -> None:
    """While SGLang empties its pool all of it is there; the iterations after it take the slots out once more."""
    placed = place(cached, tmp_path, environ={"KVCACHED_MAX_KV_TOKENS": str(CAP)})
    run_idle(placed)
    assert pool_of(placed).available_size() == CAP
    pool_of(placed).clear()
    assert pool_of(placed).available_size() == SIZE == placed.scheduler.invariant_checker.max_total_num_tokens
    run_idle(placed)
    assert pool_of(placed).available_size() == CAP == placed.scheduler.invariant_checker.max_total_num_tokens


def test_a_cap_below_the_longest_request_is_refused_with_the_number(cached: Cached, tmp_path: Path) -> None:
    """Nothing moves, and whoever waits is told what to give instead."""
    placed = place(cached, tmp_path)
    run_idle(placed, 2)
    cap_to(placed, LONGEST - 1, tmp_path)
    answer = said(tmp_path).cap
    assert answer.outcome is Outcome.REJECTED_BELOW_FLOOR
    assert str(LONGEST + 2) in answer.reason
    assert pool_of(placed).available_size() == SIZE


def test_two_ranks_hold_the_same_slots_after_every_iteration(tmp_path: Path) -> None:
    """Whatever is published, cached and released, both allocators are equal, slot by slot and in order."""
    generator = random.Random(14)
    ranks = [place(build("unified-python", size=SIZE), tmp_path / str(rank), source=not rank) for rank in range(2)]
    for placed in ranks:
        placed.receive([Startup(-1, CAP)])
    for number in range(150):
        messages = []
        if generator.random() < 0.3:
            bound = generator.choice(list(Bound))
            tokens = generator.choice([-1, CAP, SIZE // 2, 2000] if bound is Bound.CAP else [-1, 0, 300, 2000])
            messages = [Update(number + 1, tokens, bound)]
        leaf = [generator.randrange(1000) for _ in range(generator.randrange(20, 400))]
        flushes = generator.random() < 0.03
        for placed in ranks:
            placed.receive(messages)
            tree, pool = placed.scheduler.tree_cache, pool_of(placed)
            Cached(tree, pool, None, SIZE).insert(leaf)
            placed.hooks.release()
            if flushes:
                tree.reset()
                pool.clear()
        lists = [pool_of(placed).free_pages.tolist() for placed in ranks]
        assert lists[0] == lists[1], number


def test_a_rank_whose_pool_cannot_be_capped_speaks_for_all(tmp_path: Path) -> None:
    """The reason travels to the source rank before the first message; limits work on."""
    store = HashStore()
    other = scheduler_of(build("unified-python"), source=False)
    declare(other, store, no_cap="another allocator")
    placed = take_place(scheduler_of(build("unified-python")), tmp_path, store)
    run_idle(placed, 2)
    report = said(tmp_path)
    assert (report.cap.outcome, report.cap.reason) == (Outcome.UNSUPPORTED_ENGINE, "another allocator")
    assert report.outcome is Outcome.STARTUP


def test_startup_bounds_that_pipeline_stages_do_not_keep_are_said_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The environment's limit and cap are named with the reason, by the one rank that publishes for its replica."""
    environ = {"KVCACHED_MAX_CACHED_TOKENS": "900", "KVCACHED_MAX_KV_TOKENS": "5000"}
    for source in (True, False):
        scheduler = scheduler_of(build("unified-python"), source=source)
        scheduler.ps.pp_size = 2
        take_place(scheduler, tmp_path, HashStore(), environ)
    warnings = [message for message in caplog.messages if "is not applied" in message]
    assert warnings == [f"{name}={value} is not applied: {PIPELINE_OBSTACLE}" for name, value in environ.items()]


def test_a_rank_that_cannot_return_its_memory_is_left_out_of_the_figures(tmp_path: Path) -> None:
    """What one rank could not return is not said to be returned, and the rank is named."""
    store = HashStore()
    other = scheduler_of(build("unified-python"), source=False)
    agreement = declare(other, store)
    placed = take_place(scheduler_of(build("unified-python")), tmp_path, store)
    run_idle(placed, 2)
    source, replica = placed.hooks._source, placed.hooks._replica
    assert source is not None
    assert replica is not None
    real: Any = replica._policy
    policy = SimpleNamespace(report=lambda: replace(real.report(), pool_bytes=800, returned_bytes=600))
    assert source._report_of(policy).returned_bytes == 600  # type: ignore[arg-type]
    agreement.declare_shortfall("EINVAL")
    source._listen(policy)  # type: ignore[arg-type]
    report = source._report_of(policy)  # type: ignore[arg-type]
    assert (report.returned_bytes, report.resident_bytes, report.returns) == (300, 500, "rank 1: EINVAL")
