"""The parts of the estimator one by one: which blocks are sampled, how curves are read, what windows forget."""

from __future__ import annotations

import random
import time

import pytest

from kvcached.advisor.curve import MOST_LIMITS, limit_for, spaced_limits, value_at
from kvcached.advisor.estimator import FOLD_TOKENS, Estimator
from kvcached.advisor.sampling import EVERY_BLOCK, SamplePlan
from kvcached.advisor.windows import Tally, Window


def chain(name: object, blocks: int, plan: SamplePlan) -> list[object]:
    """Return the samples of a chain of its own."""
    return [(name, position) for position in plan.positions[: plan.samples_of(blocks)]]


@pytest.mark.parametrize("block_tokens", [1, 16, 48, 64, 128, 512, 1024])
def test_samples_stand_for_all_tokens(block_tokens: int) -> None:
    """Each sample is within the tokens that it represents, and together they represent every token once."""
    plan = SamplePlan(block_tokens)
    samples = plan.samples_of(40_000 // block_tokens)
    begin = 0
    for position, weight in zip(plan.positions[:samples], plan.weights[:samples], strict=True):
        assert begin <= position * block_tokens < begin + weight
        begin += weight


def test_samples_are_close_together_where_prompts_share_most() -> None:
    """One sample represents 64 tokens at the head of a chain, for 256 further on, for 512 after that."""
    plan = SamplePlan(16)
    assert plan.samples_of((8192 + 10 * 512) // 16) == 2048 // 64 + 6144 // 256 + 10
    assert [plan.weights[0], plan.weights[40], plan.weights[60]] == [64, 256, 512]
    assert plan.positions[:2] == [2, 6]


@pytest.mark.parametrize("block_tokens", [1, 16, 100, 512])
@pytest.mark.parametrize("largest", [1, 4000, 262_144, 3_000_000, 2**31])
def test_limits_grow_up_to_the_largest(block_tokens: int, largest: int) -> None:
    """Candidate limits grow strictly, are whole blocks, end at the largest, and hold the startup limit as it is."""
    limits = spaced_limits(block_tokens, largest, 16_001)
    assert limits == sorted(set(limits))
    assert len(limits) <= MOST_LIMITS
    assert all(limit % block_tokens == 0 for limit in limits if limit != 16_001)
    assert largest < 2 * block_tokens or limits[-1] == max(largest // block_tokens * block_tokens, limits[0])
    assert (16_001 in limits) == (largest > 16_001)


def test_curve_reads_the_same_in_both_directions() -> None:
    """The limit for the rate at a limit is that limit, wherever the curve rises."""
    limits = spaced_limits(16, 100_000)
    values = [0.1 + 0.8 * place / len(limits) for place in range(len(limits) + 1)]
    for limit in (1, 100, 512, 513, 7000, 65_536, 99_999, 100_000):
        found = limit_for(limits, values, value_at(limits, values, limit))
        assert found == pytest.approx(limit)
    assert limit_for(limits, values, 0.05) == 0
    assert limit_for(limits, values, 0.95) is None
    assert value_at(limits, values, 1e9) == values[-1]


def test_window_forgets_by_prompt_tokens() -> None:
    """After a half-life of prompt tokens, what was counted before weighs half."""
    window = Window(1000.0, 2)
    window.add(Tally([10, 0], prompt=100, hit=10), predicted=4.0)
    window.add(Tally([0, 7], prompt=1000, hit=0), predicted=0.0)
    assert window.prompt == pytest.approx(100 / 2 + 1000)
    assert window.buckets == pytest.approx([5, 7])
    assert (window.hit, window.predicted) == pytest.approx((5, 2))


def test_model_is_compared_at_the_limits_that_were_in_force() -> None:
    """A change of the limit splits what the model predicts for the comparison with the engine."""
    estimator = Estimator(SamplePlan(16, EVERY_BLOCK), (160, 1600), half_lives=(float("inf"),))
    prompt = chain("prompt", 20, estimator.plan)
    estimator.set_limit(0)
    for request, limit in enumerate((0, 0, 1600, 1600)):
        estimator.set_limit(limit)
        estimator.admit(request, prompt, 20, 320, 0)
        estimator.release(request, prompt)
    estimator.fold()
    (window,) = estimator.windows
    assert window.buckets == [0, 3 * 160, 3 * 160]
    assert window.predicted == 2 * 320


def test_a_request_is_counted_once() -> None:
    """A release of an unknown request, a second release, and an admission without a release leave nothing in use."""
    estimator = Estimator(SamplePlan(16, EVERY_BLOCK), (1600,))
    prompt = chain("prompt", 5, estimator.plan)
    estimator.release("unknown", prompt)
    estimator.admit("a", prompt, 5, 80, 0)
    estimator.admit("a", prompt, 5, 80, 0)
    assert estimator.stack.used_samples == 5
    estimator.release("a", prompt)
    estimator.release("a", prompt)
    assert (estimator.stack.used_samples, estimator.stack.idle_samples) == (0, 5)
    assert (estimator.requests, estimator.observed_tokens) == (2, 160)


def test_curve_never_falls_and_memory_is_bounded() -> None:
    """Rates grow with the limit, and idle samples never represent more than the largest limit."""
    rng = random.Random(1)
    plan = SamplePlan(16)
    estimator = Estimator(plan, spaced_limits(16, 50_000))
    for request in range(400):
        keys = chain(rng.randrange(30), rng.randint(1, 500), plan)
        estimator.admit(request, keys, len(keys) * 32, rng.randint(1, 8000), 0)
        estimator.release(request, keys)
        assert estimator.stack.idle_samples <= 50_000 // 64
    estimator.fold()
    for window in estimator.windows:
        assert min(window.buckets) >= 0
        assert window.prompt > 0


def test_a_long_prompt_takes_no_millisecond() -> None:
    """Admission and release of a 32k prompt take less than 1 ms of CPU, the usual call among many."""
    plan = SamplePlan(16)
    estimator = Estimator(plan, spaced_limits(16, 1_000_000))
    times = []
    for request in range(60):
        keys = chain(request % 40, 2000, plan)
        begin = time.thread_time_ns()
        estimator.admit(request, keys, 2000, 32_000, 0)
        estimator.release(request, keys)
        times.append(time.thread_time_ns() - begin)
    assert estimator.observed_tokens > FOLD_TOKENS
    assert sorted(times)[len(times) // 2] < 1_000_000
