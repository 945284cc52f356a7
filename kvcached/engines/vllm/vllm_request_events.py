"""vLLM's scheduler tells the advisor of each request's beginnings and ends; nothing is decided here.

Two methods of the one scheduler object are followed, ``schedule`` (its output names the requests that were admitted)
and ``_free_request_blocks`` (a request ends or is preempted), and ``reset_prefix_cache`` of its cache manager. What is
tried for requests that are not admitted in the end is not seen, so that each admission counts once.

Not every request that a schedule calls new is: a model runner of the second version gets resumed requests as new ones,
and so does every runner the next turn of a streaming session. vLLM's own hit rate leaves both out, and so do we.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from kvcached.advisor.curve import spaced_limits
from kvcached.advisor.estimator import Estimator
from kvcached.advisor.observer import Figures, Observer, attempt
from kvcached.advisor.page_file import PageWriter
from kvcached.advisor.sampling import SamplePlan
from kvcached.engines.vllm.wraps import Wraps
from kvcached.settings import is_advisor_wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.ledger.subscription import Subscription
    from kvcached.policy import PrefixCache, RetentionPolicy

_log = logging.getLogger(__name__)


class VllmSchedulerEvents:
    """Turns what one scheduler does into events. Scheduler thread only."""

    def __init__(self, scheduler: Any, block_tokens: int, observer: Observer) -> None:  # noqa: ANN401 - vLLM's
        """Report to ``observer``; ``block_tokens`` is the size of the blocks that vLLM hashes."""
        self._requests: dict[str, Any] = scheduler.requests
        self._block_tokens = block_tokens
        self._observer = observer
        self._preempted: dict[str, Any] = {}
        self._wraps = Wraps()

    def attach(self, scheduler: Any) -> None:  # noqa: ANN401
        """Follow the methods of ``scheduler``. Raises ``AttributeError`` if it lacks one; nothing is changed then."""
        followed: list[tuple[Any, str, Callable[..., None]]] = [
            (scheduler, "schedule", self._after_schedule),
            (scheduler, "_free_request_blocks", self._after_free),
            (scheduler.kv_cache_manager, "reset_prefix_cache", self._after_reset),
        ]
        stock = [getattr(owner, name) for owner, name, _ in followed]
        for (owner, name, then), method in zip(followed, stock, strict=True):
            self._wraps.replace(owner, name, self._followed(method, then))

    def detach(self) -> None:
        """Give the scheduler its methods back."""
        self._wraps.undo()

    def tick(self, *, idle: bool = False) -> None:
        """Do what is due after a step; ``idle`` says that there is no work."""
        self._observer.tick(idle=idle)

    def close(self) -> None:
        """Tell the outside nothing more."""
        self._observer.close()

    def _after_schedule(self, output: Any, *_args: Any, **_named: Any) -> None:  # noqa: ANN401
        if output.scheduled_new_reqs or self._preempted:
            self._observer.watch(self._admit, output)

    def _after_free(self, _result: Any, *args: Any, **named: Any) -> None:  # noqa: ANN401
        self._observer.watch(self._release, args[0] if args else named["request"])

    def _after_reset(self, done: Any, *_args: Any, **_named: Any) -> None:  # noqa: ANN401
        if done:
            self._observer.watch(Estimator.clear)

    def _admit(self, estimator: Estimator, output: Any) -> None:  # noqa: ANN401
        for new in output.scheduled_new_reqs:
            request = self._requests[new.req_id]
            preempted = getattr(request, "num_preemptions", 0) > 0
            if preempted or new.req_id in self._preempted or estimator.holds(new.req_id):
                self._admit_again(estimator, request)
            else:
                self._admit_new(estimator, request, _local_hits(request, new))
        for name in [name for name in self._preempted if name in output.num_scheduled_tokens]:
            self._admit_again(estimator, self._preempted[name])

    def _admit_again(self, estimator: Estimator, request: Any) -> None:  # noqa: ANN401
        """Admit a request that was counted before: it only holds its blocks again, or more of them."""
        name = request.request_id
        self._preempted.pop(name, None)
        estimator.admit(name, self._samples(estimator, request, request.num_tokens), 0, 0, 0)

    def _admit_new(self, estimator: Estimator, request: Any, hit_tokens: int) -> None:  # noqa: ANN401
        keys = self._samples(estimator, request, request.num_prompt_tokens)
        if getattr(request, "skip_reading_prefix_cache", False):  # prompt logprobs, for instance
            estimator.admit(request.request_id, keys, 0, 0, 0)
            return
        tokens = request.num_prompt_tokens
        estimator.admit(request.request_id, keys, (tokens - 1) // self._block_tokens, tokens, hit_tokens)

    def _release(self, estimator: Estimator, request: Any) -> None:  # noqa: ANN401
        name = request.request_id
        estimator.release(name, self._samples(estimator, request, request.num_computed_tokens))
        if request.is_finished():
            self._preempted.pop(name, None)
        else:
            self._preempted[name] = request

    def _samples(self, estimator: Estimator, request: Any, tokens: int) -> list[Any]:  # noqa: ANN401
        """Return the hashes of the sampled ones of the blocks that ``tokens`` tokens fill."""
        hashes, plan = request.block_hashes, estimator.plan
        samples = plan.samples_of(min(len(hashes), tokens // self._block_tokens))
        return [hashes[place] for place in plan.positions[:samples]]

    def _followed(self, stock: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
        """Return ``stock`` followed by ``then`` with its result and arguments; a fault of ours ends the advisor."""

        @functools.wraps(stock)
        def followed(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever vLLM passes and returns
            result = stock(*args, **named)
            try:
                then(result, *args, **named)
            except Exception as error:  # noqa: BLE001 - vLLM called its own method, not us; inline: runs at each step
                self.detach()
                self._observer.watch(_fail, error)
            return result

        return followed


def _local_hits(request: Any, new: Any) -> int:  # noqa: ANN401 - vLLM's Request and NewRequestData
    """Return how many tokens of the prompt were in the GPU's own cache: what a KV connector brings was not."""
    stats: Any = getattr(request, "prefill_stats", None)
    if getattr(stats, "num_prompt_tokens", 0):
        return int(stats.num_local_cached_tokens)
    return int(new.num_computed_tokens)


def _fail(_estimator: Estimator, error: Exception) -> None:
    raise error


def open_advisor(
    scheduler: Any,  # noqa: ANN401 - vLLM's
    cache: PrefixCache,
    policy: RetentionPolicy,
    subscription: Subscription,
    ledger_dir: str,
) -> VllmSchedulerEvents | None:
    """Let an advisor watch ``scheduler``; None if it is switched off, or this vLLM cannot be watched. Never raises."""
    if not is_advisor_wanted():
        return None
    return attempt(lambda: _open(scheduler, cache, policy, subscription, ledger_dir))


def _open(
    scheduler: Any,  # noqa: ANN401
    cache: PrefixCache,
    policy: RetentionPolicy,
    subscription: Subscription,
    ledger_dir: str,
) -> VllmSchedulerEvents:
    block_tokens = int(scheduler.kv_cache_manager.block_pool.hash_block_size)
    estimator = Estimator(
        SamplePlan(block_tokens), spaced_limits(block_tokens, cache.capacity_tokens(), policy.limit_tokens)
    )
    observer = Observer(
        estimator,
        cache.block_tokens,
        lambda: Figures(policy.limit_tokens, cache.active_tokens(), cache.capacity_tokens()),
        PageWriter(ledger_dir),
        subscription.place,
        note=_note(scheduler),
    )
    events = VllmSchedulerEvents(scheduler, block_tokens, observer)
    events.attach(scheduler)
    return events


def _note(scheduler: Any) -> str:  # noqa: ANN401
    """Return what users should know of the curve of this engine."""
    notes = []
    if len(scheduler.kv_cache_manager.coordinator.single_type_managers) > 1:
        notes.append("several KV-cache groups: the curve is for full attention, and approximate")
    if getattr(scheduler, "connector", None) is not None:
        notes.append("measured hits do not include those of the KV connector")
    return "; ".join(notes)
