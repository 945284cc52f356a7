"""SGLang's scheduler tells the advisor of each request's beginnings and ends; nothing is decided here.

A batch that is prepared for prefill names requests that begin; the same one comes by again for each chunk of a long
prompt, and after a retraction. A release ends it. The tree's nodes bear no names that would outlive them, so the tokens
are hashed here, from sample to sample: once when a request begins, and what was added when it ends.
"""

from __future__ import annotations

import pkgutil
from array import array
from typing import TYPE_CHECKING, Any

from kvcached.advisor.curve import spaced_limits
from kvcached.advisor.estimator import Estimator
from kvcached.advisor.observer import Figures, Observer, attempt
from kvcached.advisor.page_file import PageWriter
from kvcached.advisor.sampling import SamplePlan
from kvcached.settings import is_advisor_wanted
from kvcached.values import UNLIMITED

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.sglang.cache import RadixPrefixCache
    from kvcached.engines.sglang.replica import ReplicaControl
    from kvcached.ledger.registration import SlotPlace
    from kvcached.settings import Settings

PREPARE = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend"
PREBUILT = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_prebuilt"
FLUSH = "sglang.srt.managers.scheduler.Scheduler.flush_cache"


def hooks_of(advisor_of: Callable[[], SglangSchedulerEvents | None]) -> tuple[tuple[str, Callable[..., None]], ...]:
    """Return targets and the hooks that come after them, for the advisor that ``advisor_of`` returns.

    Empty if this SGLang lacks a target. A release ends in :meth:`SglangSchedulerEvents.released`, through the hook
    that the limit has there anyway.
    """

    def prepare(_result: object, batch: object, *_args: object, **_named: object) -> None:
        advisor = advisor_of()
        if advisor is not None:
            advisor.prepared(batch)

    def prebuilt(_result: object, batch: object, *_args: object, **_named: object) -> None:
        advisor = advisor_of()
        if advisor is not None:
            advisor.prebuilt(batch)

    def flush(done: object, *_args: object, **_named: object) -> None:
        advisor = advisor_of()
        if advisor is not None:
            advisor.flushed(done)

    if not is_advisor_wanted() or not _has_targets():
        return ()
    found = ((PREPARE, prepare), (FLUSH, flush))
    return (*found, (PREBUILT, prebuilt)) if _is_callable(PREBUILT) else found


def _has_targets() -> bool:
    return _is_callable(PREPARE) and _is_callable(FLUSH)


def _is_callable(name: str) -> bool:
    try:
        return callable(pkgutil.resolve_name(name))
    except (ImportError, AttributeError):
        return False


class SglangSchedulerEvents:
    """Turns what one scheduler does into events. Scheduler thread only; nothing here raises."""

    def __init__(self, page_tokens: int, observer: Observer) -> None:
        """Report to ``observer``; ``page_tokens`` is the smallest unit that the tree keeps."""
        self._page_tokens = page_tokens
        self._observer = observer
        self._keys: dict[str, list[int]] = {}

    def prepared(self, batch: Any) -> None:  # noqa: ANN401 - SGLang's ScheduleBatch
        """Note that the requests of ``batch`` are about to be prefilled, each for the first time or not."""
        self._observer.watch(self._admit_new, batch, _device_hits)

    def prebuilt(self, batch: Any) -> None:  # noqa: ANN401 - SGLang's ScheduleBatch
        """Note that the requests of ``batch``, which another server has prefilled, are about to be decoded here."""
        self._observer.watch(self._admit_new, batch, _matched_here)

    def released(self, request: Any, named: dict[str, Any]) -> None:  # noqa: ANN401 - SGLang's Req
        """Note that ``request`` gave its tokens back; ``named`` are the other arguments of the release."""
        self._observer.watch(self._release, request, named)

    def flushed(self, done: object) -> None:
        """Note that the cache was flushed, if it was."""
        if done:
            self._observer.watch(Estimator.clear)

    def tick(self) -> None:
        """Do what is due once per iteration, idle or not."""
        self._observer.tick()

    def _admit_new(self, estimator: Estimator, batch: Any, hits_of: Callable[[Any], int]) -> None:  # noqa: ANN401
        for request in batch.reqs:
            # A streaming session keeps what its turns computed to itself: no hit of theirs comes from idle tokens.
            if request.rid not in self._keys and not _is_streaming(request):
                self._admit(estimator, request, hits_of)

    def _admit(self, estimator: Estimator, request: Any, hits_of: Callable[[Any], int]) -> None:  # noqa: ANN401
        tokens = len(request.origin_input_ids)
        keys = self._keys[request.rid] = self._extended(estimator.plan, request, [], tokens)
        if request.retracted_stain:  # it was counted when it came for the first time
            estimator.admit(request.rid, keys, 0, 0, 0)
            return
        hittable = tokens - 1
        if request.return_logprob and request.logprob_start_len >= 0:
            hittable = min(hittable, request.logprob_start_len)
        estimator.admit(request.rid, keys, hittable // self._page_tokens, tokens, hits_of(request))

    def _release(self, estimator: Estimator, request: Any, named: dict[str, Any]) -> None:  # noqa: ANN401
        keys = self._keys.pop(request.rid, None)
        if keys is None:
            return
        plan, prompt, answer = estimator.plan, len(request.origin_input_ids), len(request.output_ids)
        kept = named.get("checkpoint", named.get("is_insert", True))
        if kept and not getattr(request, "skip_radix_cache_insert", False) and answer:
            tokens = prompt + answer - 1  # the last token was never computed into the cache
            cached = self._extended(plan, request, keys, tokens)
        else:
            # Not inserted now: the tree has what it had before, the prompt as far as it was computed.
            tokens = prompt if answer else min(prompt, int(getattr(request, "already_computed", 0)))
            cached = keys[: plan.samples_of(tokens // self._page_tokens)]
        estimator.release(request.rid, cached)

    def _extended(self, plan: SamplePlan, request: Any, keys: list[int], tokens: int) -> list[int]:  # noqa: ANN401
        """Return the names of the samples in the first ``tokens`` tokens, of which ``keys`` are the first ones."""
        samples = plan.samples_of(tokens // self._page_tokens)
        if samples <= len(keys):
            return keys[:samples]
        begin = self._end_of(plan, len(keys) - 1) if keys else 0
        name = keys[-1] if keys else hash(_namespace(request))
        text = _tokens_from(request, begin)
        found = list(keys)
        place = 0
        for sample in range(len(keys), samples):
            end = self._end_of(plan, sample) - begin
            name = hash((name, text[place:end].tobytes()))
            found.append(name)
            place = end
        return found

    def _end_of(self, plan: SamplePlan, sample: int) -> int:
        """Return the token up to which a sample's page reaches: its name stands for all tokens before."""
        return (plan.positions[sample] + 1) * self._page_tokens


def _device_hits(request: Any) -> int:  # noqa: ANN401
    """Return how many tokens of its prompt a request found cached.

    With host and disk tiers, only what the device had: the others are not bounded by the limit.
    """
    if getattr(request, "cached_tokens_host", 0) or getattr(request, "cached_tokens_storage", 0):
        return int(request.cached_tokens_device)
    return int(getattr(request, "cached_tokens_device", 0) or request.cached_tokens)


def _matched_here(request: Any) -> int:  # noqa: ANN401
    """Return how many tokens of its prompt a request found cached on this server; its own counts tell of the other."""
    matched = getattr(request, "prefix_len", None)
    return int(len(request.prefix_indices) if matched is None else matched)


def _is_streaming(request: Any) -> bool:  # noqa: ANN401
    return bool(getattr(getattr(request, "session", None), "streaming", False))


def _namespace(request: Any) -> tuple[object, ...]:  # noqa: ANN401
    """Return what has to be the same for two requests to share any cached token, their tokens apart."""
    return request.extra_key, getattr(request, "cache_salt", None), getattr(request, "lora_id", None)


def _tokens_from(request: Any, begin: int) -> array[int]:  # noqa: ANN401
    """Return prompt and answer from the token ``begin`` on."""
    prompt = request.origin_input_ids
    text = array("q", prompt[begin:])
    text.extend(request.output_ids[max(0, begin - len(prompt)) :])
    return text


def open_advisor(
    scheduler: Any,  # noqa: ANN401 - SGLang's
    cache: RadixPrefixCache,
    replica: ReplicaControl,
    place_of: Callable[[], SlotPlace | None],
    settings: Settings,
) -> SglangSchedulerEvents | None:
    """Return what lets an advisor watch ``scheduler``, of a source rank; None if it is switched off. Never raises."""
    if not is_advisor_wanted() or not _has_targets():
        return None
    return attempt(lambda: _open(scheduler, cache, replica, place_of, settings))


def _open(
    scheduler: Any,  # noqa: ANN401
    cache: RadixPrefixCache,
    replica: ReplicaControl,
    place_of: Callable[[], SlotPlace | None],
    settings: Settings,
) -> SglangSchedulerEvents:
    page_tokens = cache.block_tokens
    limits = spaced_limits(page_tokens, cache.capacity_tokens(), settings.startup_limit_tokens)
    observer = Observer(
        Estimator(SamplePlan(page_tokens), limits),
        page_tokens,
        lambda: Figures(_limit_of(replica), cache.active_tokens(), cache.capacity_tokens()),
        PageWriter(settings.ledger_dir),
        place_of,
        note=_note(scheduler),
    )
    return SglangSchedulerEvents(page_tokens, observer)


def _limit_of(replica: ReplicaControl) -> int:
    limit = replica.limit_tokens
    return UNLIMITED if limit is None else limit


def _note(scheduler: Any) -> str:  # noqa: ANN401
    """Return what users should know of the curve of this engine."""
    args = scheduler.server_args
    remarks = []
    policy = str(getattr(args, "radix_eviction_policy", "lru")).lower()
    if policy != "lru":
        remarks.append(f"the cache evicts by {policy}, but the curve assumes least recently used first")
    if getattr(args, "enable_streaming_session", False):
        remarks.append("requests of streaming sessions are not observed")
    if getattr(args, "disaggregation_mode", None) == "decode" and not _is_callable(PREBUILT):
        remarks.append("this SGLang does not say which requests a decode server takes over, so none are observed")
    if getattr(scheduler.tree_cache, "disable", False):
        remarks.append("the prefix cache is off, so nothing is retained at any limit")
    return "; ".join(remarks)
