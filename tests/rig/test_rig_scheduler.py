"""The rig's scheduler and what the limit does to it: on one rank, in this process, without a ledger."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.policy import RetentionPolicy
from kvcached.rig.block_cache import BlockCache, chain_keys
from kvcached.rig.cache_digest import CacheDigest
from kvcached.rig.injected_faults import FailingCache
from kvcached.rig.kv_rows import KvRows
from kvcached.rig.scheduler import Scheduler
from kvcached.values import UNLIMITED, Outcome, Update
from kvcached.workload.request import Request

BLOCK_TOKENS = 16


class Engine:
    """One rank's cache, scheduler and policy, stepped as a rank steps them."""

    def __init__(self, cache: BlockCache, limit: int = UNLIMITED, step_tokens: int = 1024, chunk: int = 65536) -> None:
        self.cache = cache
        blocks = cache.capacity_tokens() // cache.block_tokens
        self.scheduler = Scheduler(cache, KvRows(blocks, cache.block_tokens), step_tokens=step_tokens)
        self.policy = RetentionPolicy(cache, limit, chunk_tokens=chunk)
        self.requests = 0

    def add(self, content: tuple[int, ...], output_tokens: int = 1) -> None:
        """Queue a prompt that fills the blocks of ``content`` and one token more; its answer is like no other."""
        prompt_tokens = len(content) * BLOCK_TOKENS + 1
        blocks = (prompt_tokens + output_tokens) // BLOCK_TOKENS
        answer = tuple(10**6 + self.requests * 10**3 + position for position in range(len(content), blocks))
        self.scheduler.add(Request(self.requests, prompt_tokens, output_tokens, content + answer))
        self.requests += 1

    def step(self) -> None:
        """Run one step in a rank's order."""
        self.policy.on_step()
        if self.scheduler.step():
            self.policy.on_release()

    def run(self) -> None:
        """Step until all requests are finished."""
        while self.scheduler.unfinished:
            self.step()
        self.cache.check_integrity()


def blocks_of(tokens: int) -> tuple[int, ...]:
    """Return distinct content that fills ``tokens`` tokens."""
    return tuple(range(tokens // BLOCK_TOKENS))


def test_long_prompts_are_computed_in_chunks() -> None:
    """A prompt longer than a step's budget takes several steps, and its blocks can be found as they fill."""
    engine = Engine(BlockCache(64, BLOCK_TOKENS), step_tokens=160)
    engine.add(blocks_of(480))
    engine.step()
    assert engine.cache.match(chain_keys(blocks_of(480)))[0] == 10
    engine.step()
    assert engine.cache.match(chain_keys(blocks_of(480)))[0] == 20
    engine.run()
    assert engine.scheduler.counts.finished == 1


def test_several_requests_share_a_step() -> None:
    """Short prompts that fit into one budget are all computed in the same step."""
    engine = Engine(BlockCache(64, BLOCK_TOKENS))
    for first in range(4):
        engine.add((first, 9, 9), output_tokens=50)
    engine.step()
    assert engine.cache.active_tokens() == 4 * 4 * BLOCK_TOKENS


def test_repeated_prompt_hits_what_is_cached() -> None:
    """A prompt seen before is computed from its last token only."""
    engine = Engine(BlockCache(64, BLOCK_TOKENS))
    engine.add((1, 2, 3))
    engine.run()
    engine.add((1, 2, 3))
    engine.run()
    assert engine.scheduler.counts.hit_tokens == 3 * BLOCK_TOKENS
    assert engine.scheduler.counts.prompt_tokens == 2 * (3 * BLOCK_TOKENS + 1)


def test_last_prompt_token_is_always_computed() -> None:
    """A prompt that ends with a full block does not take that block from the cache."""
    engine = Engine(BlockCache(64, BLOCK_TOKENS))
    for index in range(2):
        engine.scheduler.add(Request(index, 2 * BLOCK_TOKENS, 1, (1, 2)))
        engine.run()
    assert engine.scheduler.counts.hit_tokens == BLOCK_TOKENS


def test_answers_are_cached_too() -> None:
    """Blocks that the answer fills are found by a later prompt that contains the answer."""
    engine = Engine(BlockCache(64, BLOCK_TOKENS))
    engine.scheduler.add(Request(0, BLOCK_TOKENS + 4, 40, (1, 2, 3)))
    engine.run()
    engine.add((1, 2, 3, 4))
    engine.run()
    assert engine.scheduler.counts.hit_tokens == 3 * BLOCK_TOKENS


def test_same_prompt_twice_in_a_step_is_cached_once() -> None:
    """Two requests that compute the same prompt at the same time leave one copy behind."""
    engine = Engine(BlockCache(64, BLOCK_TOKENS))
    engine.add((1, 2, 3))
    engine.add((1, 2, 3))
    engine.run()
    assert engine.cache.idle_tokens() == 3 * BLOCK_TOKENS


def test_requests_wait_for_room() -> None:
    """A request whose worst case does not fit beside the running ones waits, and nobody is preempted."""
    engine = Engine(BlockCache(8, BLOCK_TOKENS))
    engine.add((1, 2, 3), output_tokens=30)
    engine.add((4, 5, 6), output_tokens=30)
    engine.step()
    assert engine.cache.match(chain_keys((4,)))[0] == 0
    engine.run()
    assert engine.scheduler.counts.finished == 2


def test_hits_count_as_room_only_once() -> None:
    """Idle blocks that a request will hit cannot also be evicted for the rest of it, so it waits."""
    engine = Engine(BlockCache(8, BLOCK_TOKENS))
    engine.add((1, 2, 3, 4))
    engine.run()
    engine.add((9,), output_tokens=15)
    engine.step()
    assert engine.cache.active_tokens() == 2 * BLOCK_TOKENS
    engine.add((1, 2, 3, 4), output_tokens=40)
    engine.step()
    assert engine.cache.active_tokens() == 2 * BLOCK_TOKENS, "needs three blocks beside its four hits; two are free"
    engine.run()
    assert engine.scheduler.counts.finished == 3


def test_request_larger_than_the_cache_is_refused() -> None:
    """A request that could never run is counted and does not block those behind it."""
    engine = Engine(BlockCache(4, BLOCK_TOKENS))
    engine.add(blocks_of(160))
    engine.add((1,))
    engine.run()
    assert engine.scheduler.counts.refused == 1
    assert engine.scheduler.counts.finished == 1


def test_limit_zero_retains_nothing() -> None:
    """With limit 0 no block outlives its request and a repeated prompt gets no hit."""
    engine = Engine(BlockCache(64, BLOCK_TOKENS), limit=0)
    for _ in range(2):
        engine.add((1, 2, 3))
        engine.run()
        assert engine.cache.idle_tokens() == 0
    assert engine.scheduler.counts.hit_tokens == 0


def test_unlimited_evicts_nothing() -> None:
    """With limit -1 the policy never evicts."""
    engine = Engine(BlockCache(64, BLOCK_TOKENS))
    engine.add(blocks_of(480))
    engine.run()
    engine.policy.update(Update(1, UNLIMITED))
    assert engine.policy.report().evicted_tokens == 0
    assert engine.cache.idle_tokens() == 480


@pytest.mark.parametrize(("limit", "kept"), [(0, 0), (1, 16), (15, 16), (16, 16), (17, 16), (31, 16), (32, 32)])
def test_small_limits_keep_whole_blocks(limit: int, kept: int) -> None:
    """A positive limit below one block keeps one block; any other is rounded down to whole blocks."""
    engine = Engine(BlockCache(64, BLOCK_TOKENS), limit=limit)
    engine.add(blocks_of(480))
    engine.run()
    assert engine.cache.idle_tokens() == kept


def test_shrinking_below_what_is_in_use_takes_the_idle_part() -> None:
    """With 800 tokens held and 480 idle, limit 96 evicts 384 and leaves the held ones alone."""
    engine = Engine(BlockCache(256, BLOCK_TOKENS))
    engine.add(blocks_of(480))
    engine.run()
    engine.add(tuple(range(1000, 1049)), output_tokens=100)
    engine.step()
    assert engine.cache.active_tokens() == 800
    engine.policy.update(Update(1, 96))
    assert engine.policy.report().evicted_tokens == 384
    assert engine.cache.idle_tokens() == 96
    assert engine.cache.active_tokens() == 800
    assert engine.policy.report().outcome is Outcome.APPLIED


def test_limit_holds_for_blocks_in_use_once_they_are_released() -> None:
    """Limit 0 while everything is held evicts nothing and hinders nobody; the release does it, with no update more."""
    engine = Engine(BlockCache(256, BLOCK_TOKENS))
    engine.add(blocks_of(480), output_tokens=60)
    engine.step()
    engine.policy.update(Update(1, 0))
    assert engine.policy.report().evicted_tokens == 0
    assert not engine.policy.draining
    engine.run()
    assert engine.scheduler.counts.finished == 1
    assert engine.cache.idle_tokens() == 0


def fill_with_a_million_tokens(chunk: int) -> Engine:
    """Return an engine that holds 1,000,000 idle tokens in 62,500 blocks."""
    engine = Engine(BlockCache(65536, BLOCK_TOKENS), step_tokens=1_000_000, chunk=chunk)
    for first in range(10):
        engine.add((10**5 + first, *blocks_of(99_984)))
    engine.run()
    assert engine.cache.idle_tokens() == 1_000_000
    return engine


def drop_everything(engine: Engine) -> list[float]:
    """Publish limit 0 and step until it holds; return the CPU seconds of the update and of each step."""
    durations = []
    begin = time.thread_time()
    engine.policy.update(Update(1, 0))
    durations.append(time.thread_time() - begin)
    while engine.policy.draining:
        before = engine.cache.idle_tokens()
        begin = time.thread_time()
        engine.step()
        durations.append(time.thread_time() - begin)
        assert before - 65536 <= engine.cache.idle_tokens() < before, "every step makes progress, none too much"
    assert engine.cache.idle_tokens() == 0
    return durations


def test_big_drop_goes_in_bounded_steps() -> None:
    """A million idle tokens go in chunks, with progress at every step and each a fraction of the whole drop's time."""
    (at_once,) = drop_everything(fill_with_a_million_tokens(chunk=1_000_000))
    durations = drop_everything(fill_with_a_million_tokens(chunk=65536))
    assert len(durations) == 16
    assert statistics.median(durations) < at_once / 4


EVENTS = st.one_of(
    st.tuples(st.just("request"), st.lists(st.integers(0, 2), max_size=8), st.integers(1, 60)),
    st.tuples(st.just("limit"), st.sampled_from((-1, 0, 5, 16, 40, 100, 300))),
    st.tuples(st.just("steps"), st.integers(1, 4)),
)


def take_event(engine: Engine, event: tuple[Any, ...], revision: int) -> None:
    """Do what ``event`` says to ``engine``."""
    if event[0] == "request":
        engine.add(tuple(event[1]), output_tokens=event[2])
    elif event[0] == "limit":
        engine.policy.update(Update(revision, event[1]))
    else:
        for _ in range(event[1]):
            engine.step()
            check_step(engine)


def check_step(engine: Engine) -> None:
    """Fail unless all indexes agree, running requests still have their blocks, and the limit holds."""
    engine.cache.check_integrity()
    for sequence in engine.scheduler._running:
        engine.scheduler._pages.verify(sequence.blocks[: sequence.committed], sequence.keys[: sequence.committed])
    limit = engine.policy.limit_tokens
    if limit >= 0 and not engine.policy.draining:
        assert engine.cache.idle_tokens() <= (max(limit, BLOCK_TOKENS) if limit else 0)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(EVENTS, max_size=40), chunk=st.sampled_from((16, 48, 65536)))
def test_any_load_under_any_limits_keeps_the_invariants(events: list[tuple[Any, ...]], chunk: int) -> None:
    """Whatever arrives and is published, two ranks stay equal, held blocks stay, and idle tokens keep to the limit."""
    engines = [Engine(BlockCache(24, BLOCK_TOKENS), limit=64, step_tokens=100, chunk=chunk) for _ in range(2)]
    digests = [CacheDigest(engine.cache) for engine in engines]
    for revision, event in enumerate((*events, ("steps", 3)), 1):
        for engine, digest in zip(engines, digests, strict=True):
            take_event(engine, event, revision)
            digest.end_step(revision)
    assert digests[0].hexdigest() == digests[1].hexdigest()
    for engine in engines:
        engine.run()
        while engine.policy.draining:
            engine.step()
        check_step(engine)
        assert engine.cache.active_tokens() == 0


def test_failing_eviction_keeps_limit_and_service() -> None:
    """An exception in eviction leaves the new limit stored and requests served; a release tries again."""
    engine = Engine(FailingCache(64, BLOCK_TOKENS, failures=2))
    engine.add((1, 2, 3))
    engine.run()
    engine.policy.update(Update(1, 0))
    report = engine.policy.report()
    assert (report.outcome, report.applied.limit_tokens) == (Outcome.EVICTION_FAILED, 0)
    engine.step()
    assert engine.policy.report().eviction_errors == 1, "steps alone must not try again"
    for first in (4, 5):
        engine.add((first,))
        engine.run()
    report = engine.policy.report()
    assert (report.outcome, report.eviction_errors, report.idle_tokens) == (Outcome.APPLIED, 2, 0)
