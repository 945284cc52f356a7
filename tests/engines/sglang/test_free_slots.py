"""Pages taken out of SGLang's real allocators and put back, against the allocators' own books."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sglang_pools import PLACE, make_allocator, make_scheduler

from kvcached.engines.sglang.free_slots import FreeSlots, UnsupportedPoolError
from kvcached.engines.sglang.kv_memory import KvMemory
from kvcached.engines.sglang.rank_messages import Startup

if TYPE_CHECKING:
    import torch

SIZE = 4096
STEPS = 1500


def totals_of(scheduler: SimpleNamespace) -> set[int]:
    """Return what SGLang's checks take for the whole pool."""
    return {scheduler.invariant_checker.max_total_num_tokens, scheduler.pool_stats_observer.max_total_num_tokens}


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_no_page_is_lost_or_there_twice(page: int, *, need_sort: bool) -> None:
    """Whatever is allocated, freed, taken out, put back and flushed, all pages are in one place, and totals agree."""
    generator = random.Random(page * 2 + need_sort)
    allocator = make_allocator(SIZE, page, need_sort=need_sort)
    scheduler = make_scheduler(allocator)
    slots = FreeSlots(scheduler, lambda: None)
    if generator.random() < 0.5:
        slots.reuse_newest_first()
    held: list[torch.Tensor] = []
    for _ in range(STEPS):
        step(generator, allocator, slots, held)
        pages = [*slots.free_pages(), *slots.out_numbers()]
        pages += [number for each in held for number in (each[::page] // page).tolist()]
        assert sorted(pages) == list(range(1, SIZE // page + 1))
        assert totals_of(scheduler) == {SIZE - slots.out_pages * page}
        assert allocator.available_size() + sum(map(len, held)) == SIZE - slots.out_pages * page
    slots.put_back(SIZE)
    assert totals_of(scheduler) == {SIZE}


def step(generator: random.Random, allocator: Any, slots: FreeSlots, held: list[torch.Tensor]) -> None:  # noqa: ANN401
    """Do one thing at random."""
    kind = generator.randrange(25)
    if kind < 8:
        found = allocator.alloc(generator.randrange(1, 20) * slots.page_tokens)
        if found is not None:
            held.append(found.clone())
    elif kind < 14 and held:
        allocator.free_group_begin()
        for _ in range(min(len(held), 3)):
            allocator.free(held.pop(generator.randrange(len(held))))
        allocator.free_group_end()
    elif kind < 19:
        slots.take_out(generator.randrange(1, 60))
    elif kind < 24:
        slots.put_back(generator.randrange(1, 60))
    else:
        held.clear()
        allocator.clear()


def test_what_is_freed_first_is_reused_last_where_that_was_asked_for() -> None:
    """A load that needs few slots at a time keeps to few slots."""
    allocator = make_allocator(SIZE, 1)
    slots = FreeSlots(make_scheduler(allocator), lambda: None)
    slots.reuse_newest_first()
    used: set[int] = set()
    for _ in range(200):
        found = allocator.alloc(64)
        used.update(found.tolist())
        allocator.free(found)
    assert len(used) == 64


@pytest.mark.parametrize("lacking", ["invariant_checker", "pool_stats_observer"])
def test_a_scheduler_without_the_totals_is_left_alone(lacking: str) -> None:
    """Nothing is changed before all names are found."""
    allocator = make_allocator(SIZE, 1)
    scheduler = make_scheduler(allocator, **{lacking: SimpleNamespace()})
    with pytest.raises(UnsupportedPoolError, match=lacking):
        FreeSlots(scheduler, lambda: None)
    assert "clear" not in vars(allocator)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"server_args": SimpleNamespace(speculative_algorithm="EAGLE")}, "speculative decoding"),
        ({"server_args": SimpleNamespace(disaggregation_mode="prefill")}, "disaggregated"),
        ({"is_hybrid_swa": True}, "sliding windows"),
        ({"is_hybrid_ssm": True}, "state-space"),
        ({"max_req_len": None}, "how long a request can be"),
    ],
)
def test_what_cannot_be_capped_says_why(changed: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """A scheduler that counts on its free slots in another way is refused, and so is a startup cap, aloud."""
    allocator = make_allocator(SIZE, 1, pool=SimpleNamespace())
    memory = KvMemory(make_scheduler(allocator, **changed), PLACE)
    cache: Any = SimpleNamespace(block_tokens=1)  # else not asked: there is no pool to adapt
    policy = memory.build(Startup(-1), cache, -1, lambda: None)
    assert not caplog.messages
    policy = memory.build(Startup(-1, cap_tokens=900), cache, -1, lambda: None)
    assert caplog.messages == [f"KVCACHED_MAX_KV_TOKENS=900 is not applied: {memory.no_cap}"]
    assert policy.capacity is None
    assert reason in memory.no_cap
    assert reason in memory.obstacle
