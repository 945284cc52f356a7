"""What the advisor is told of real schedulers' requests, without a model: who is new, and what was hit where."""

# ruff: noqa: ANN401 - vLLM's objects have no types here

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm_cores as cores
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_serving import BLOCK_TOKENS, prompt

from kvcached.advisor.curve import spaced_limits
from kvcached.advisor.estimator import Estimator
from kvcached.advisor.observer import Figures, Observer
from kvcached.advisor.sampling import SamplePlan
from kvcached.engines.vllm.vllm_request_events import VllmSchedulerEvents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCKS = 128


@pytest.fixture(scope="module")
def config(model: Path) -> Iterator[Any]:
    """Return a configuration of vLLM's for the schedulers."""
    before = dict(os.environ)
    made = cores.make_config(model)
    made.cache_config.num_gpu_blocks = BLOCKS
    init_none_hash(sha256)
    yield made
    os.environ.clear()
    os.environ.update(before)


class Watched:
    """A scheduler that an advisor watches, and as much of a model as gives each request a token per step."""

    def __init__(self, config: Any, *, second_runner: bool = False) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = second_runner
        plan = SamplePlan(BLOCK_TOKENS)
        self.estimator = Estimator(plan, spaced_limits(BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS, -1))
        writer: Any = SimpleNamespace(write=None, close=None)
        observer = Observer(self.estimator, BLOCK_TOKENS, lambda: Figures(-1, 0, 1), writer, lambda: None)
        VllmSchedulerEvents(self.scheduler, BLOCK_TOKENS, observer).attach(self.scheduler)

    def add(self, name: str, seed: int, max_tokens: int = 4, **more: Any) -> Request:
        """Send a prompt of 512 tokens."""
        request = Request(
            name,
            prompt(seed),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
            **more,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """Make one step; return what was scheduled."""
        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        tokens = [[7] for _ in names]
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(
            scheduled, ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)
        )
        return scheduled

    def run(self) -> None:
        """Serve everything to its end."""
        while self.scheduler.has_unfinished_requests():
            self.step()

    @property
    def counted(self) -> tuple[int, int, float]:
        """Requests, prompt tokens and hit tokens as the advisor counts them."""
        self.estimator.fold()
        return self.estimator.requests, self.estimator.observed_tokens, round(self.estimator.windows[1].hit)


@pytest.mark.parametrize("second_runner", [False, True], ids=["first", "second"])
def test_a_resumed_request_is_no_new_one(config: Any, *, second_runner: bool) -> None:
    """A request that is preempted five times counts once and hits nothing, with either model runner."""
    watched = Watched(config, second_runner=second_runner)
    request = watched.add("often", 1, max_tokens=40)
    listed = 0
    for _ in range(5):
        listed += len(watched.step().scheduled_new_reqs)
        watched.step()
        watched.scheduler.running.remove(request)
        watched.scheduler._preempt_request(request, 0.0)
    watched.run()
    assert request.num_preemptions == 5
    assert (listed > 1) == second_runner
    assert watched.counted == (1, 512, 0)


def test_the_next_turn_of_a_session_is_no_new_request(config: Any) -> None:
    """A streaming session's further turns hold what they held: they count no prompt again, and no hits."""
    watched = Watched(config)
    request = watched.add("session", 1, max_tokens=3, resumable=True)
    for seed in (2, 3):
        for _ in range(3):
            watched.step()
        update = Request(
            "session", prompt(seed, 64), SamplingParams(max_tokens=3, ignore_eos=True), None, resumable=seed == 2
        )
        watched.scheduler.add_request(update)
    watched.run()
    assert request.is_finished()
    assert watched.counted == (1, 512, 0)


def test_what_a_connector_brings_is_no_hit_of_the_gpus_cache(config: Any) -> None:
    """Of a prompt that was found half in the GPU's cache and half elsewhere, only the first half is a hit."""
    watched = Watched(config)
    watched.add("before", 1)
    watched.run()
    stock = watched.scheduler.kv_cache_manager.get_computed_blocks
    request = watched.add("again", 1)
    stats = request.prefill_stats

    def and_elsewhere(*args: Any, **named: Any) -> Any:
        found = stock(*args, **named)
        stats.set = lambda **values: type(stats).set(
            stats, **(values | {"num_local_cached_tokens": 256, "num_external_cached_tokens": 224})
        )
        return found

    watched.scheduler.kv_cache_manager.get_computed_blocks = and_elsewhere
    scheduled = watched.step()
    assert [new.num_computed_tokens for new in scheduled.scheduled_new_reqs] == [480]
    watched.run()
    assert watched.counted == (2, 1024, 256)


def test_a_reset_that_failed_for_a_connector_alone_is_a_reset(config: Any) -> None:
    """What counts is the GPU's pool: it is empty although the scheduler calls the reset a failure."""
    watched = Watched(config)
    watched.add("before", 1)
    watched.run()
    watched.scheduler.reset_connector_cache = lambda: False
    assert watched.scheduler.reset_prefix_cache(reset_connector=True) is False
    assert watched.estimator.stack.idle_samples == 0
