"""The limit of one process and its enforcement."""

from __future__ import annotations

import random

import pytest
from support.toys import ToyCache

from kvcached.policy import RetentionPolicy
from kvcached.values import Outcome, Update


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(-1, 320), (0, 0), (1, 16), (8, 16), (15, 16), (16, 16), (17, 16), (31, 16), (32, 32), (999, 320)],
)
def test_effective_limits(limit: int, kept: int) -> None:
    """A positive limit below one block keeps one block, 0 keeps nothing and -1 everything."""
    cache = ToyCache(idle=320)
    policy = RetentionPolicy(cache, -1)
    policy.update(Update(1, limit))
    assert cache.idle == kept
    assert policy.limit_tokens == limit
    assert policy.report().outcome is Outcome.APPLIED


def test_later_releases_keep_to_the_limit() -> None:
    """What becomes idle after an update is held to the same limit."""
    cache = ToyCache(idle=160)
    policy = RetentionPolicy(cache, -1)
    policy.update(Update(1, 64))
    cache.idle += 160
    policy.on_release()
    assert cache.idle == 64


def test_startup_limit_is_in_force_from_the_first_release() -> None:
    """The startup limit bounds the cache before anything is published."""
    cache = ToyCache(idle=160)
    policy = RetentionPolicy(cache, 32)
    policy.on_release()
    assert cache.idle == 32
    assert policy.report().outcome is Outcome.STARTUP


def test_active_tokens_are_not_touched() -> None:
    """A limit below what is in use evicts the idle part and leaves the rest."""
    cache = ToyCache(idle=500, active=800, block_tokens=1)
    policy = RetentionPolicy(cache, -1)
    policy.update(Update(1, 100))
    report = policy.report()
    assert (report.idle_tokens, report.active_tokens, report.evicted_tokens) == (100, 800, 400)


def test_big_drop_goes_in_equal_chunks() -> None:
    """A drop is evicted in steps of the same number of tokens, visibly, until it is complete."""
    cache = ToyCache(idle=1600)
    policy = RetentionPolicy(cache, -1, chunk_tokens=320)
    policy.update(Update(1, 0))
    outcomes = [policy.report().outcome]
    while policy.draining:
        policy.on_step()
        outcomes.append(policy.report().outcome)
    assert cache.evictions == [320] * 5
    assert outcomes == [Outcome.APPLYING] * 4 + [Outcome.APPLIED]


def test_step_without_a_drop_does_nothing() -> None:
    """A step evicts nothing unless a drop is under way, so that a failing eviction is not retried by the clock."""
    cache = ToyCache(idle=160)
    policy = RetentionPolicy(cache, 0)
    policy.on_step()
    assert cache.idle == 160


def test_failing_eviction_keeps_the_limit_and_is_retried_at_release_only() -> None:
    """The limit stays stored, serving goes on, and the next release tries again; steps in between do not."""
    cache = ToyCache(idle=160)
    policy = RetentionPolicy(cache, -1)
    cache.error = RuntimeError("pool is upset")
    policy.update(Update(1, 0))
    for _ in range(1000):
        policy.on_step()
    report = policy.report()
    assert (report.applied, report.outcome, report.eviction_errors) == (Update(1, 0), Outcome.EVICTION_FAILED, 1)
    assert "pool is upset" in report.reason
    cache.error = None
    policy.on_release()
    assert (cache.idle, policy.report().outcome) == (0, Outcome.APPLIED)


def test_same_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An eviction that keeps failing fills counters, not the log."""
    cache = ToyCache(idle=160)
    policy = RetentionPolicy(cache, 0)
    cache.error = RuntimeError("again")
    for _ in range(50):
        policy.on_release()
    assert policy.report().eviction_errors == 50
    assert len(caplog.records) == 1


def test_nothing_evictable_is_held_without_spinning() -> None:
    """When nothing can go the outcome says held, one pass is made, and the rest goes when it is released."""
    cache = ToyCache(idle=160)
    cache.evictable = False
    policy = RetentionPolicy(cache, -1)
    policy.update(Update(1, 0))
    for _ in range(100):
        policy.on_step()
    assert policy.report().outcome is Outcome.HELD
    assert cache.evictions == [0]
    cache.evictable = True
    policy.on_release()
    assert (cache.idle, policy.report().outcome) == (0, Outcome.APPLIED)


def test_update_replaces_a_drop_under_way() -> None:
    """A newer update decides at once, whatever is left of an older drop."""
    cache = ToyCache(idle=1600)
    policy = RetentionPolicy(cache, -1, chunk_tokens=160)
    policy.update(Update(1, 0))
    policy.update(Update(2, -1))
    assert not policy.draining
    assert cache.idle == 1440
    assert policy.report().outcome is Outcome.APPLIED


def test_repeated_and_older_updates_are_ignored() -> None:
    """Delivering an update twice, or one that is overtaken, changes nothing."""
    cache = ToyCache(idle=160)
    policy = RetentionPolicy(cache, -1)
    policy.update(Update(2, 64))
    for stale in (Update(2, 0), Update(1, 0), Update(2, -1)):
        policy.update(stale)
        policy.reject(stale, Outcome.REJECTED_INVALID, "stale")
    assert policy.report().applied == Update(2, 64)
    assert policy.report().outcome is Outcome.APPLIED
    assert cache.idle == 64


def test_cache_at_its_limit_is_not_asked_to_evict() -> None:
    """A release that leaves exactly the limit costs no call into the engine's eviction."""
    cache = ToyCache(idle=64)
    policy = RetentionPolicy(cache, 64)
    policy.on_release()
    assert cache.evictions == []
    assert policy.report().outcome is Outcome.STARTUP


def test_rejection_settles_without_applying_and_stays_visible() -> None:
    """A rejected update keeps the limit in force and is still shown after later releases."""
    cache = ToyCache(idle=160)
    policy = RetentionPolicy(cache, 64)
    policy.reject(Update(7, 0), Outcome.REJECTED_PIPELINE_PARALLEL, "pp_size is 2")
    policy.on_release()
    report = policy.report()
    assert (report.applied, report.settled_revision) == (Update(0, 64), 7)
    assert (report.outcome, report.reason) == (Outcome.REJECTED_PIPELINE_PARALLEL, "pp_size is 2")
    assert cache.idle == 64


def test_ranks_with_the_same_calls_decide_the_same() -> None:
    """Policies that see the same updates and releases evict the same tokens at the same steps."""
    seed = random.randrange(2**32)
    print("seed", seed)
    traces = []
    for _ in range(3):
        rng = random.Random(seed)
        cache = ToyCache()
        policy = RetentionPolicy(cache, 640, chunk_tokens=160)
        for step in range(500):
            if rng.random() < 0.2:
                policy.update(Update(step + 1, rng.choice([-1, 0, 5, 640, 3200])))
            if rng.random() < 0.7:
                cache.idle += 16 * rng.randrange(20)
                policy.on_release()
            policy.on_step()
        traces.append((cache.evictions, policy.report()))
    assert traces[0] == traces[1] == traces[2]
