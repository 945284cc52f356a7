"""What the advisor is told of requests that begin and end in unusual ways, with SGLang's own requests."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from kvcached.advisor.estimator import Estimator
from kvcached.advisor.sampling import EVERY_BLOCK, SamplePlan
from kvcached.engines.sglang.sglang_request_events import SglangSchedulerEvents, _note

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = (0, 100, 1000)
PROMPT = list(range(1, 101))


@dataclass
class Watched:
    """An estimator, and the events that reach it."""

    estimator: Estimator = field(default_factory=lambda: Estimator(SamplePlan(1, EVERY_BLOCK), LIMITS))

    def watch(self, event: Callable[..., None], *args: object) -> None:
        """Pass an event on as the observer does."""
        event(self.estimator, *args)

    def hits(self) -> dict[int, int]:
        """Return the hit tokens that the model sees at each limit."""
        self.estimator.fold()
        buckets = self.estimator.windows[0].buckets
        return {limit: round(sum(buckets[: index + 1])) for index, limit in enumerate(LIMITS)}


def request(name: str, prompt: list[int] = PROMPT, **changes: Any) -> Any:  # noqa: ANN401 - SGLang's Req
    """Return a request of SGLang with ``prompt``."""
    made: Any = Req(name, "", array("q", prompt), SamplingParams(max_new_tokens=1))
    for attribute, value in changes.items():
        setattr(made, attribute, value)
    return made


def batch(*requests: object) -> SimpleNamespace:
    """Return what the hooks read of a batch."""
    return SimpleNamespace(reqs=list(requests))


def finish(events: SglangSchedulerEvents, ended: Any) -> None:  # noqa: ANN401
    """Let a request end after one token of an answer."""
    ended.output_ids.append(7)
    events.released(ended, {"checkpoint": True})


def test_tenants_with_salts_of_their_own_share_nothing() -> None:
    """Equal prompts under different salts are no hits for one another; under the same salt they are."""
    watched = Watched()
    events = SglangSchedulerEvents(1, watched)  # type: ignore[arg-type]
    for name, salt in (("one", "a"), ("two", "b")):
        begun = request(name, cache_salt=salt)
        events.prepared(batch(begun))
        finish(events, begun)
    assert watched.hits()[1000] == 0
    events.prepared(batch(request("three", cache_salt="b")))
    assert watched.hits()[1000] == len(PROMPT) - 1


def test_a_decode_server_observes_what_it_takes_over() -> None:
    """Requests prefilled elsewhere count once, with the hits in this server's own tree and not in the other's."""
    watched = Watched()
    events = SglangSchedulerEvents(1, watched)  # type: ignore[arg-type]
    first = request("first", cached_tokens=90, cached_tokens_device=90)
    events.prebuilt(batch(first))
    events.prebuilt(batch(first))
    finish(events, first)
    second = request("second", cached_tokens=90, cached_tokens_device=90)
    second.prefix_len, second.prefix_indices = 99, range(99)  # releases differ in which of them they have
    events.prebuilt(batch(second))
    assert watched.hits()[1000] == 99
    assert (watched.estimator.requests, watched.estimator.observed_tokens) == (2, 200)
    assert watched.estimator.windows[0].hit == 99


def test_turns_of_a_streaming_session_are_left_out() -> None:
    """A session keeps its rows to itself: they are neither idle nor anybody's hits, and the page says so."""
    watched = Watched()
    events = SglangSchedulerEvents(1, watched)  # type: ignore[arg-type]
    turn = request("turn", session=SimpleNamespace(streaming=True, session_id="s"))
    events.prepared(batch(turn))
    finish(events, turn)
    events.prepared(batch(request("other")))
    assert watched.hits()[1000] == 0
    assert watched.estimator.requests == 1


def test_the_page_says_what_is_not_observed() -> None:
    """The note names an order of eviction, sessions and a cache that is switched off, each only where it is so."""
    args = SimpleNamespace(radix_eviction_policy="lru", enable_streaming_session=False, disaggregation_mode="null")
    scheduler = SimpleNamespace(server_args=args, tree_cache=SimpleNamespace(disable=False))
    assert _note(scheduler) == ""
    args.enable_streaming_session = True
    assert "streaming sessions are not observed" in _note(scheduler)
    scheduler.tree_cache.disable = True
    args.radix_eviction_policy = "lfu"
    assert "prefix cache is off" in _note(scheduler)
    assert "lfu" in _note(scheduler)
