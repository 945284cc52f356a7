"""The memory of SGLang's real pools on the CPU: what is returned, what is kept, and why it is refused."""

from __future__ import annotations

import ctypes
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from sglang_pools import Capped, heads_pool, latent_pool, regions_of, tensors_of

from kvcached.memory.elastic import Elastic
from kvcached.memory.kernel_figures import resident_bytes
from kvcached.values import Bound, Outcome, Update

SIZE = 4096
CAP = SIZE // 4
SEED = 14


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", [heads_pool, latent_pool], ids=["heads", "latent"])
def test_the_memory_of_a_capped_pool_is_back_and_comes_again(kind: Any, page: int) -> None:  # noqa: ANN401
    """What the kernel holds of the pool falls by what is reported, no kept row changes, and a raise brings it back."""
    pool = kind(SIZE, page)
    for tensor in tensors_of(pool):
        tensor.fill_(1.0)
    capped = Capped(pool, page)
    before = resident_bytes(regions_of(pool))
    capped.cap(CAP)
    report, figures = capped.capacity.report(), capped.memory.figures()
    assert (report.outcome, report.applied) == (Outcome.APPLIED, Update(1, CAP, Bound.CAP))
    assert capped.slots.withheld_tokens() == SIZE - CAP
    fallen = before - resident_bytes(regions_of(pool))
    assert figures.returned_bytes >= 0.97 * (SIZE - CAP) / SIZE * figures.pool_bytes
    assert fallen >= figures.returned_bytes
    kept = torch.cat((torch.arange(page), capped.allocator.alloc(CAP)))
    assert all(bool((tensor[kept] == 1).all()) for tensor in tensors_of(pool))
    capped.cap(-1)
    rest = capped.allocator.alloc(SIZE - CAP)
    for tensor in tensors_of(pool):
        tensor[rest] = 1.0
    assert capped.memory.figures().returned_bytes == 0
    assert resident_bytes(regions_of(pool)) == before


@pytest.mark.parametrize("late", [False, True])
def test_a_pool_that_is_locked_in_memory_says_so_and_is_capped_all_the_same(*, late: bool) -> None:
    """Locked before control, it is seen at once; afterwards, at the first return, which is the last one tried."""
    libc = ctypes.CDLL(None, use_errno=True)
    pool = heads_pool(SIZE)
    try:
        if not late:
            lock(libc.mlock, pool)
        capped = Capped(pool)
        assert capped.policy.returns == "yes" if late else "mlock" in capped.policy.returns
        if late:
            lock(libc.mlock, pool)
        check_capped_in_place(capped)
        assert ("EINVAL" if late else "mlock") in capped.policy.returns
    finally:
        lock(libc.munlock, pool)


def check_capped_in_place(capped: Capped) -> None:
    """Cap a pool whose memory stays."""
    capped.cap(CAP)
    assert capped.capacity.report().outcome is Outcome.APPLIED
    assert capped.slots.withheld_tokens() == SIZE - CAP
    assert capped.memory.figures().returned_bytes == 0


def lock(call: Any, pool: Any) -> None:  # noqa: ANN401
    """Call ``mlock`` or ``munlock`` on all tensors of a pool."""
    for region in regions_of(pool):
        assert call(ctypes.c_void_p(region.address), ctypes.c_size_t(region.row_bytes * region.rows)) == 0


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("enable_hierarchical_cache", "hierarchical cache"),
        ("enable_lmcache", "LMCache"),
        ("enable_memory_saver", "memory saver"),
    ],
)
def test_memory_that_others_hold_is_not_returned(setting: str, reason: str) -> None:
    """With an option that lets others read or keep the pool's memory, the cap works and no memory goes."""
    pool = heads_pool(SIZE)
    capped = Capped(pool, settings={setting: True})
    check_capped_in_place(capped)
    assert reason in capped.memory.figures().returns
    assert capped.memory.figures().pool_bytes == sum(region.row_bytes * region.rows for region in regions_of(pool))


@pytest.mark.parametrize("page", [1, 16])
def test_a_steady_load_on_an_elastic_pool_takes_next_to_no_page_again(page: int) -> None:
    """What SGLang's allocator hands out is what it got back last, so returned pages stay returned.

    30 % of the pool are in use: requests of up to 128 tokens, which stay cached until the oldest are evicted.
    """
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    pool = heads_pool(SIZE, page)
    capped = Capped(pool, page)
    running: list[Any] = []
    cached: list[Any] = []
    capped.slots._active_tokens = lambda: sum(map(len, running))
    capped.slots.reuse_newest_first()
    elastic = Elastic(capped.memory, capped.slots, 4.0, 0.0)
    returned = []
    for turn in range(1, 1500):
        running.append(capped.allocator.alloc(16 * dice.randrange(1, 9)))
        if len(running) > 3:
            cached.append(running.pop(0))
        while sum(map(len, cached)) > 0.2 * SIZE:
            capped.allocator.free(cached.pop(0))
        elastic.on_step(0.1 * turn)
        capped.memory.advance()
        returned.append(capped.memory.figures().returned_bytes)
    later = returned[len(returned) // 2 :]
    whole = capped.memory.figures().pool_bytes
    print(f"returned: {100 * min(later) / whole:.1f} to {100 * max(later) / whole:.1f} % of the pool")
    assert min(later) > 0.5 * whole
    assert sum(max(once - after, 0) for once, after in pairwise(later)) < 0.02 * whole
