"""What the plugins make of a scheduler's doings: each request counts exactly once, whatever it goes through.

The suites in ``tests/engines`` show the same on the engines themselves; here are the cases that are rare there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvcached.advisor.estimator import Estimator
from kvcached.advisor.sampling import EVERY_BLOCK, SamplePlan
from kvcached.engines.sglang import sglang_request_events as sglang
from kvcached.engines.vllm import vllm_request_events as vllm

BLOCK = 16
LIMITS = (320, 10_000)


class Watch:
    """An observer that lets errors out."""

    def __init__(self) -> None:
        self.estimator = Estimator(SamplePlan(BLOCK, EVERY_BLOCK), LIMITS, half_lives=(float("inf"),))

    def watch(self, event: Any, *args: Any) -> None:  # noqa: ANN401
        event(self.estimator, *args)

    def tick(self, *, idle: bool = False) -> None:
        del idle

    def counted(self) -> tuple[int, int, float, float]:
        """Return requests, prompt tokens, hit tokens measured, and hit tokens in use by the model."""
        self.estimator.fold()
        (window,) = self.estimator.windows
        return self.estimator.requests, self.estimator.observed_tokens, window.hit, window.buckets[0]

    def samples(self) -> tuple[int, int]:
        """Return how many samples are in use and idle."""
        return self.estimator.stack.used_samples, self.estimator.stack.idle_samples


# vLLM ---------------------------------------------------------------------------------------------------------------


class VllmRequest:
    """A request as vLLM's scheduler knows it."""

    def __init__(self, name: str, text: list[int], *, look_up: bool = True) -> None:
        self.request_id = name
        self.num_prompt_tokens = self.num_tokens = len(text)
        self.num_computed_tokens = 0
        self.skip_reading_prefix_cache = not look_up
        self.block_hashes = [tuple(text[:end]) for end in range(BLOCK, len(text) + 1, BLOCK)]
        self.finished = False

    def is_finished(self) -> bool:
        return self.finished


class VllmCacheManager:
    """The method of the cache manager that is followed."""

    def reset_prefix_cache(self) -> bool:
        return True


class VllmScheduler:
    """The methods that are followed."""

    def __init__(self) -> None:
        self.kv_cache_manager = VllmCacheManager()
        self.requests: dict[str, VllmRequest] = {}
        self.next: list[tuple[str, int]] = []
        self.resumed: list[str] = []

    def schedule(self) -> Any:  # noqa: ANN401
        new = [SimpleNamespace(req_id=name, num_computed_tokens=hits) for name, hits in self.next]
        return SimpleNamespace(
            scheduled_new_reqs=new, num_scheduled_tokens=dict.fromkeys([*dict(self.next), *self.resumed], 1)
        )

    def _free_request_blocks(self, request: VllmRequest) -> None:
        pass


@dataclass
class Vllm:
    """A followed scheduler."""

    watch: Watch = field(default_factory=Watch)
    scheduler: VllmScheduler = field(default_factory=VllmScheduler)

    def __post_init__(self) -> None:
        vllm.VllmSchedulerEvents(self.scheduler, BLOCK, self.watch).attach(self.scheduler)  # type: ignore[arg-type]

    def admit(self, name: str, text: list[int], hits: int = 0, *, look_up: bool = True) -> VllmRequest:
        request = self.scheduler.requests[name] = VllmRequest(name, text, look_up=look_up)
        self.scheduler.next = [(name, hits)]
        self.scheduler.schedule()
        self.scheduler.next = []
        request.num_computed_tokens = len(text)
        return request

    def step(self, *resumed: str) -> None:
        self.scheduler.resumed = list(resumed)
        self.scheduler.schedule()

    def free(self, request: VllmRequest, *, finished: bool = True) -> None:
        request.finished = finished
        self.scheduler._free_request_blocks(request)


def text_of(seed: int, tokens: int = 100) -> list[int]:
    return [seed * 1000 + place for place in range(tokens)]


def test_vllm_counts_a_request_by_its_prompt_and_its_hits() -> None:
    """An admission counts prompt and hit tokens; what is in use at that moment is a hit at any limit."""
    engine = Vllm()
    engine.admit("a", text_of(1))
    engine.admit("b", text_of(1), hits=96)
    assert engine.watch.counted() == (2, 200, 96, 96)
    assert engine.watch.samples() == (6, 0)


def test_vllm_preemption_counts_once() -> None:
    """A preempted request leaves what it had computed, comes back uncounted, and ends once."""
    engine = Vllm()
    request = engine.admit("a", text_of(1))
    engine.free(request, finished=False)
    assert engine.watch.samples() == (0, 6)
    engine.step()
    assert engine.watch.samples() == (0, 6)
    engine.step("a")
    assert engine.watch.samples() == (6, 0)
    engine.step("a")
    engine.free(request)
    assert engine.watch.samples() == (0, 6)
    assert engine.watch.counted()[:2] == (1, 100)


def test_vllm_request_that_is_aborted_while_preempted_does_not_come_back() -> None:
    """Its end is noted, though it holds no blocks any more."""
    engine = Vllm()
    request = engine.admit("a", text_of(1))
    engine.free(request, finished=False)
    engine.free(request)
    engine.step("a")
    assert engine.watch.samples() == (0, 6)


def test_vllm_aborted_prefill_leaves_what_was_computed() -> None:
    """Blocks that were never computed are not idle after an abort."""
    engine = Vllm()
    request = engine.admit("a", text_of(1))
    request.num_computed_tokens = 40
    engine.free(request)
    assert engine.watch.samples() == (0, 2)


def test_vllm_prompt_without_look_up_is_left_out_but_held() -> None:
    """It counts neither as prompt nor as hit, as in vLLM's own rate; its blocks are in use and then idle."""
    engine = Vllm()
    request = engine.admit("a", text_of(1), look_up=False)
    assert engine.watch.counted()[:2] == (0, 0)
    assert engine.watch.samples() == (6, 0)
    engine.free(request)
    assert engine.watch.samples() == (0, 6)


def test_vllm_reset_forgets_what_is_idle() -> None:
    """After a reset of the cache nothing idle is known."""
    engine = Vllm()
    engine.free(engine.admit("a", text_of(1)))
    engine.scheduler.kv_cache_manager.reset_prefix_cache()
    assert engine.watch.samples() == (0, 0)


def test_vllm_unscheduled_request_is_not_seen() -> None:
    """A request that was never admitted ends without a trace."""
    engine = Vllm()
    engine.free(VllmRequest("a", text_of(1)))
    assert engine.watch.samples() == (0, 0)


# SGLang -------------------------------------------------------------------------------------------------------------


@dataclass
class SglangRequest:
    """A request as SGLang's scheduler knows it."""

    rid: str
    origin_input_ids: list[int]
    cached_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    retracted_stain: bool = False
    already_computed: int = 0
    return_logprob: bool = False
    logprob_start_len: int = -1
    extra_key: str | None = None


@dataclass
class Sglang:
    """A followed scheduler."""

    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        self.events = sglang.SglangSchedulerEvents(BLOCK, self.watch)  # type: ignore[arg-type]

    def prepare(self, *requests: SglangRequest) -> None:
        self.events.prepared(SimpleNamespace(reqs=requests))

    def release(self, request: SglangRequest, **named: Any) -> None:  # noqa: ANN401
        self.events.released(request, named)


def test_sglang_chunks_of_a_prompt_count_once() -> None:
    """A request that comes by for each chunk is admitted with the first."""
    engine = Sglang()
    request = SglangRequest("a", text_of(1), cached_tokens=32)
    for _ in range(3):
        engine.prepare(request)
    assert engine.watch.counted()[:3] == (1, 100, 32)
    assert engine.watch.samples() == (6, 0)


def test_sglang_names_are_the_same_however_a_text_came_about() -> None:
    """A prompt that repeats an earlier prompt and its answer hits both, wherever they met."""
    for prompt in range(90, 130):
        engine = Sglang()
        first = SglangRequest("a", text_of(1, prompt))
        engine.prepare(first)
        first.output_ids = text_of(1, 161)[prompt:]
        engine.release(first, checkpoint=True)
        assert engine.watch.samples() == (0, 10)
        engine.prepare(SglangRequest("b", text_of(1, 200), cached_tokens=160))
        assert engine.watch.samples() == (12, 0)
        engine.watch.estimator.fold()
        assert sum(engine.watch.estimator.windows[0].buckets) == 160


def test_sglang_requests_of_other_adapters_share_nothing() -> None:
    """The extra key is part of every name."""
    engine = Sglang()
    engine.prepare(SglangRequest("a", text_of(1)), SglangRequest("b", text_of(1), extra_key="lora"))
    assert engine.watch.samples() == (12, 0)


def test_sglang_retraction_counts_once() -> None:
    """A retracted request leaves its prompt, not its answer, comes back uncounted, and ends once."""
    engine = Sglang()
    request = SglangRequest("a", text_of(1))
    engine.prepare(request)
    request.output_ids = text_of(2, 60)
    engine.release(request, checkpoint=False)
    assert engine.watch.samples() == (0, 6)
    request.retracted_stain = True
    engine.prepare(request)
    engine.prepare(request)
    assert engine.watch.samples() == (6, 0)
    engine.release(request, checkpoint=True)
    assert engine.watch.samples() == (0, (100 + 59) // BLOCK)
    assert engine.watch.counted()[:2] == (1, 100)


def test_sglang_aborted_prefill_leaves_what_was_computed() -> None:
    """Of a prompt that was given up half-way, the computed chunks stay; releases go by two names of one argument."""
    for named in ({"checkpoint": False}, {"is_insert": False}):
        engine = Sglang()
        request = SglangRequest("a", text_of(1), already_computed=40)
        engine.prepare(request)
        engine.release(request, **named)
        assert engine.watch.samples() == (0, 2)


def test_sglang_release_of_an_unknown_request_is_nothing() -> None:
    """A request that was aborted while it waited ends without a trace, also twice."""
    engine = Sglang()
    engine.release(SglangRequest("a", text_of(1)))
    engine.release(SglangRequest("a", text_of(1)), checkpoint=True)
    assert engine.watch.samples() == (0, 0)


def test_sglang_flush_forgets_what_is_idle() -> None:
    """A flush that was refused changes nothing, one that was made empties the model's cache."""
    engine = Sglang()
    request = SglangRequest("a", text_of(1), output_ids=[1])
    engine.prepare(request)
    engine.release(request)
    engine.events.flushed(done=False)
    assert engine.watch.samples() == (0, 6)
    engine.events.flushed(done=True)
    assert engine.watch.samples() == (0, 0)


def test_sglang_tokens_with_logprobs_cannot_be_hits() -> None:
    """From the token on of which log probabilities are wanted, the engine computes again: the model counts no hit."""
    engine = Sglang()
    engine.prepare(SglangRequest("a", text_of(1)))
    engine.prepare(SglangRequest("b", text_of(1), cached_tokens=32, return_logprob=True, logprob_start_len=40))
    assert engine.watch.counted() == (2, 200, 32, 32)
