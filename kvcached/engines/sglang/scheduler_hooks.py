"""The five hooks in SGLang's scheduler, installed through SGLang's own registry where it is still to be applied.

==================================  ======================================================================
broadcast of requests               the source rank puts its news in front of the requests
split into work and control         with attention data parallelism, news travel with the work of the replica
request dispatcher                  each rank takes its place and learns to handle the news
processing of requests              after it: once per iteration, idle or not, paused or not
release of a request's tokens       after it: keep to the limit
==================================  ======================================================================
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kvcached.engines.sglang import hook_places, sglang_request_events, ungoverned_scheduler
from kvcached.engines.sglang.agreement import RankAgreement, Store, launch_store
from kvcached.engines.sglang.attaching import attach
from kvcached.engines.sglang.cache import RadixPrefixCache, UnsupportedCacheError
from kvcached.engines.sglang.doorbell import fit_doorbell
from kvcached.engines.sglang.identity import identify
from kvcached.engines.sglang.kv_memory import PIPELINE_OBSTACLE, KvMemory, warn_unless_applied
from kvcached.engines.sglang.placement import name_members, read_placement
from kvcached.engines.sglang.rank_messages import Startup, dialect
from kvcached.engines.sglang.replica import ReplicaControl
from kvcached.engines.sglang.replica_source import Source
from kvcached.guards import call_guarded, log_fault
from kvcached.ledger.registration import InstanceNameTakenError
from kvcached.ledger.subscription import Subscription
from kvcached.settings import STARTUP_CAP_VARIABLE, STARTUP_LIMIT_VARIABLE
from kvcached.values import UNLIMITED, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcached.engines.sglang.placement import Placement
    from kvcached.settings import Settings

_P = ParamSpec("_P")
_T = TypeVar("_T")

_log = logging.getLogger(__name__)
_logged_failures: set[tuple[str, type[Exception]]] = set()


def _guarded(hook: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """Let no exception of ``hook`` reach the scheduler's loop, where any would end the engine."""

    @functools.wraps(hook)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end serving; inline: runs at each iteration
            if (hook.__name__, type(error)) not in _logged_failures:
                _logged_failures.add((hook.__name__, type(error)))
                _log.exception("%s failed; the engine keeps serving (logged once)", hook.__name__)
            return None

    return guarded


class SchedulerHooks:
    """The hooks of one process; they do nothing until a scheduler in it has taken its place."""

    def __init__(self, settings: Settings, store_of: Callable[[], Store] = launch_store) -> None:
        """Prepare hooks for a scheduler governed by ``settings``; ``store_of`` finds the store common to its ranks."""
        self._settings = settings
        self._store_of = store_of
        self._took_place = False
        self._agreement: RankAgreement | None = None
        self._replica: ReplicaControl | None = None
        self._source: Source | None = None
        self._advisor: sglang_request_events.SglangSchedulerEvents | None = None

    def register(self) -> None:
        """Register all hooks while SGLang loads plugins; it applies them after. Call only if no target is missing."""
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        for target, hook, before in self._all():
            kind = registry.HookType.BEFORE if before else registry.HookType.AFTER
            registry.HookRegistry.register(target, hook, kind)

    def attach(self) -> None:
        """Attach all hooks, after SGLang has loaded its plugins. Call only if no target is missing."""
        for target, hook, before in self._all():
            attach(target, hook, before=before)

    def _all(self) -> Iterator[tuple[str, Callable[..., Any], bool]]:
        """Yield targets and hooks, and whether each hook comes before its target or after."""
        yield hook_places.BROADCAST, self.announce, True
        yield hook_places.SPLIT, self.keep_with_work, False
        yield hook_places.INIT_DISPATCHER, self.take_place, False
        yield hook_places.PROCESS_REQUESTS, self.end_iteration, False
        yield hook_places.RELEASE, self.release, False
        for target, hook in sglang_request_events.hooks_of(lambda: self._advisor):
            yield target, hook, False

    @_guarded
    def announce(
        self,
        receiver: object,
        recv_reqs: list[Any] | None,
        *rest: Any,  # noqa: ANN401 - SGLang's, passed on as it is
        **named: Any,  # noqa: ANN401
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Put the source rank's news, if any, in front of the requests that are about to be broadcast."""
        source = self._source
        if source is None or recv_reqs is None:
            return None
        news = source.collect()
        if not news:
            return None
        return (receiver, [*news, *recv_reqs], *rest), named

    @_guarded
    def keep_with_work(
        self,
        split: tuple[list[Any], list[Any]],
        _receiver: object,
        _recv_reqs: object,
    ) -> tuple[list[Any], list[Any]] | None:
        """Move news from the control requests to the work requests.

        With attention data parallelism, control requests are broadcast from the first replica to all, which would
        overwrite what the other replicas' source ranks have to say; work requests stay within a replica.
        """
        work, control = split
        news = [request for request in control if isinstance(request, (Startup, Update))]
        if not news:
            return None
        return [*news, *work], [request for request in control if not isinstance(request, (Startup, Update))]

    @_guarded
    def take_place(self, _result: object, scheduler: Any) -> None:  # noqa: ANN401 - SGLang's scheduler
        """Put ``scheduler`` under control, or report why it cannot be."""
        self._took_place = True
        call_guarded(functools.partial(self._stay_out, scheduler), self._join, scheduler)

    def _join(self, scheduler: Any) -> None:  # noqa: ANN401
        """Make ``scheduler`` understand the news, and prepare to follow them.

        The dispatcher comes first: a rank that does not know a message that another one sends it would die of it.
        """
        dispatcher = importlib.import_module("sglang.utils").TypeBasedDispatcher
        scheduler._request_dispatcher += dispatcher([(Startup, self.start), (Update, self.apply)])  # noqa: SLF001
        placement = read_placement(scheduler)
        store = self._store_of() if placement.ranks > 1 else None
        agreement = self._agreement = RankAgreement(placement, dialect(), store)
        cache = RadixPrefixCache(scheduler)
        memory = KvMemory(scheduler, placement)
        if placement.is_source:
            self._source = self._open_source(scheduler, placement, cache.block_tokens, agreement)
        self._replica = ReplicaControl(
            cache, memory, pipeline_parallel=placement.pp_size > 1, source=self._source, agreement=agreement
        )
        if self._source is not None:
            self._advisor = sglang_request_events.open_advisor(
                scheduler, cache, self._replica, self._source.place, self._settings
            )
        agreement.declare(no_cap=memory.no_cap, obstacle=memory.obstacle)
        if self._settings.strict and (reason := agreement.wait()):
            ungoverned_scheduler.refuse_or_warn(self._settings, reason)

    def _stay_out(self, scheduler: Any, error: Exception) -> None:  # noqa: ANN401
        """Leave this scheduler alone, and tell the other ranks and whoever publishes."""
        reason = str(error)
        if not isinstance(error, UnsupportedCacheError):
            reason = f"{type(error).__name__}: {error}"
            _log.error("this scheduler cannot be controlled", exc_info=error)
        source, self._replica, self._source, self._advisor = self._source, None, None, None
        if source is not None:
            source.close()
        if self._agreement is not None:
            unheard = log_fault(_log.debug, "the other ranks are not told why this one stays out")
            call_guarded(unheard, self._agreement.declare, reason)  # it may be the store that fails
        ungoverned_scheduler.report_scheduler(self._settings, reason, scheduler)

    @_guarded
    def start(self, startup: Startup) -> None:
        """Handle the first message of the source rank."""
        if self._replica is not None:
            self._replica.start(startup)

    @_guarded
    def apply(self, update: Update) -> None:
        """Handle an update."""
        if self._replica is not None:
            self._replica.apply(update)

    @_guarded
    def end_iteration(self, _result: object, scheduler: object, _recv_reqs: object) -> None:
        """Do what is due once per scheduler iteration."""
        if self._replica is not None:
            self._replica.end_iteration()
            if self._advisor is not None:
                self._advisor.tick()
        elif not self._took_place:  # a scheduler with a dispatcher of its own making, which our hook is no part of
            self._took_place = True
            reason = "this scheduler never called init_request_dispatcher"
            ungoverned_scheduler.report_scheduler(self._settings, reason, scheduler)

    @_guarded
    def release(self, *args: object, **named: object) -> None:
        """Keep to the limit after a request released its tokens."""
        if self._replica is not None:
            self._replica.on_release()
        source = self._source
        if source is not None and not source.began and len(args) > 1 and getattr(args[1], "output_ids", None):
            source.note_served()
        if self._advisor is not None and len(args) > 1:  # what the release returned, and the request
            self._advisor.released(args[1], named)

    def _open_source(
        self,
        scheduler: Any,  # noqa: ANN401
        placement: Placement,
        block_tokens: int,
        agreement: RankAgreement,
    ) -> Source:
        """Register this replica with the ledgers of its GPUs."""
        settings = self._settings
        staged = placement.pp_size > 1
        limit = UNLIMITED if staged else settings.startup_limit_tokens
        cap = UNLIMITED if staged else settings.startup_cap_tokens
        if staged:
            warn_unless_applied(STARTUP_LIMIT_VARIABLE, settings.startup_limit_tokens, PIPELINE_OBSTACLE)
            warn_unless_applied(STARTUP_CAP_VARIABLE, settings.startup_cap_tokens, PIPELINE_OBSTACLE)
        doorbell = fit_doorbell(scheduler)
        subscription = Subscription(
            identify(
                settings, placement, startup_limit_tokens=limit, startup_cap_tokens=cap, block_tokens=block_tokens
            ),
            name_members(placement, settings.gpu_ids, scheduler.server_args.device),
            settings.ledger_dir,
            on_publication=None if doorbell is None else doorbell.ring,
        )
        try:
            subscription.start(patient=not settings.strict)
        except InstanceNameTakenError as error:
            ungoverned_scheduler.refuse_or_warn(settings, str(error))
        startup = Startup(limit, cap, elastic_after_s=settings.elastic_after_s)
        return Source(startup, subscription, doorbell, agreement)
