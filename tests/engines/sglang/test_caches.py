"""What the plugin counts and evicts in each of SGLang's prefix caches, against the caches' own books."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from sglang_caches import Cached, UnavailableError, build

from kvcached.engines.sglang.cache import RadixPrefixCache
from kvcached.policy import RetentionPolicy
from kvcached.values import Outcome, Update

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = (
    *(("radix", page) for page in (1, 16, 64)),
    *(("unified-rust", page) for page in (1, 16, 64)),
    *(("unified-python", page) for page in (1, 16, 64)),
    ("unified-swa", 1),
    ("unified-mamba", 1),
    ("swa", 1),
    ("mamba", 1),
)


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-page{kind[1]}")
def cached(request: pytest.FixtureRequest) -> Cached:
    """Return an empty cache of each kind that this release has."""
    kind, page = request.param
    try:
        return build(kind, page=page)
    except UnavailableError as error:
        pytest.skip(str(error))


def check_books(cached: Cached, cache: RadixPrefixCache) -> None:
    """Check that every token of the pool is free, idle or locked, and counted once."""
    idle, locked, free = cache.idle_tokens(), cached.protected_tokens(), cached.free_tokens()
    assert min(idle, locked, free) >= 0
    assert idle + locked + free == cached.size == cache.capacity_tokens()
    assert cache.active_tokens() == locked


def sequences(generator: random.Random, count: int) -> list[Sequence[int]]:
    """Return sequences of which some begin like others."""
    found: list[Sequence[int]] = []
    for _ in range(count):
        begin = (
            list(generator.choice(found)[: generator.randrange(1, 200)]) if found and generator.random() < 0.5 else []
        )
        found.append(begin + [generator.randrange(1, 1000) for _ in range(generator.randrange(20, 200))])
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_idle_locked_and_free_tokens_add_up_under_changing_limits(cached: Cached, seed: int) -> None:
    """Whatever is inserted, locked, released and limited, no token is lost or counted twice, and the limit holds."""
    print("seed", seed)
    generator = random.Random(seed)
    cache = RadixPrefixCache(cached)
    policy = RetentionPolicy(cache, -1, chunk_tokens=256)
    locks = []
    for revision, ids in enumerate(sequences(generator, 60), start=1):
        cached.insert(ids)
        if generator.random() < 0.3:
            locks.append(cached.lock(ids))
        if len(locks) > 3:
            cached.unlock(locks.pop(0))
        policy.on_release()
        if generator.random() < 0.5:
            policy.update(Update(revision, generator.choice([-1, 0, 1, 64, 300, 1000])))
        while policy.draining:
            policy.on_step()
        check_books(cached, cache)
        limit = policy.limit_tokens
        if limit >= 0:
            assert cache.idle_tokens() <= (max(limit, cache.block_tokens) if limit else 0)
    for lock in locks:
        cached.unlock(lock)
    policy.update(Update(1000, 0))
    while policy.draining:
        policy.on_step()
    check_books(cached, cache)
    assert cached.free_tokens() == cached.size
    assert policy.report().outcome is Outcome.APPLIED


def test_locked_tokens_stay(cached: Cached) -> None:
    """Limit 0 takes what is idle and leaves what a request holds; it goes with the request's release."""
    cache = RadixPrefixCache(cached)
    policy = RetentionPolicy(cache, -1)
    held, idle = list(range(1, 257)), list(range(300, 428))
    cached.insert(held)
    cached.insert(idle)
    lock = cached.lock(held)
    policy.update(Update(1, 0))
    assert (cache.idle_tokens(), cached.protected_tokens()) == (0, 256)
    assert policy.report().outcome is Outcome.APPLIED
    cached.unlock(lock)
    assert cache.idle_tokens() == 256
    policy.on_release()
    assert (cache.idle_tokens(), cached.free_tokens()) == (0, cached.size)


def test_the_least_recently_used_go_first(cached: Cached) -> None:
    """A limit that leaves room for half keeps the sequences that were used last."""
    cache = RadixPrefixCache(cached)
    ids = [[start * 200 + step for step in range(1, 129)] for start in range(8)]
    for each in ids:
        cached.insert(each)
    cached.unlock(cached.lock(ids[0]))  # used again: now the youngest
    RetentionPolicy(cache, 4 * 128).on_release()
    assert cache.idle_tokens() == 4 * 128
    kept = []
    for index, each in enumerate(ids):
        lock = cached.lock(each)
        if cached.protected_tokens() == 128:
            kept.append(index)
        cached.unlock(lock)
    assert kept == [0, 5, 6, 7]


def test_tokens_that_become_idle_during_an_eviction_hide_nothing(cached: Cached) -> None:
    """A cache that completes transfers while it evicts ends with as many idle tokens; what went is counted, too.

    So the limit is not said to be held up by something, and the next step goes on.
    """
    for each in (list(range(1, 257)), list(range(300, 556))):
        cached.insert(each)
    lock = cached.lock(list(range(300, 556)))
    evict, tree = cached.tree_cache.evict, cached.tree_cache

    def complete_a_transfer(params: object) -> object:
        result = evict(params)
        if tree.evict is complete_a_transfer:
            tree.evict = evict
            cached.unlock(lock)
        return result

    tree.evict = complete_a_transfer
    policy = RetentionPolicy(RadixPrefixCache(cached), -1)
    policy.update(Update(1, 0))
    report = policy.report()
    assert (report.outcome, report.idle_tokens, report.evicted_tokens) == (Outcome.APPLYING, 256, 256)
    policy.on_step()
    report = policy.report()
    assert (report.outcome, report.idle_tokens, report.evicted_tokens) == (Outcome.APPLIED, 0, 512)
