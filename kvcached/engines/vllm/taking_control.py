"""Puts one engine core under control: finds its pool and its GPUs, registers it, and joins the parts."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcached.engines.vllm.alarm import Alarm
from kvcached.engines.vllm.bounded_pool import bound_pool
from kvcached.engines.vllm.devices import member_ids
from kvcached.engines.vllm.governor import Governor
from kvcached.engines.vllm.inproc import InprocGovernor
from kvcached.engines.vllm.prefix_cache import group_block_tokens
from kvcached.engines.vllm.process import is_externally_launched, replica_of
from kvcached.engines.vllm.relied_on import Targets, UnsupportedEngineError
from kvcached.engines.vllm.slot import take_slot
from kvcached.engines.vllm.vllm_request_events import open_advisor
from kvcached.values import Identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.vllm.bounded_pool import BoundedPool
    from kvcached.settings import Settings

_log = logging.getLogger(__name__)

EXTERNALLY_LAUNCHED = (
    "it was started by an external launcher (torchrun): each rank has its own scheduler, and all must "
    "decide alike, which a limit that reaches them at different steps would break"
)

CACHING_OFF = "prefix caching is switched off"


def bind(
    targets: Targets,
    engine: Any,  # noqa: ANN401 - vLLM's EngineCore
    settings: Settings,
    on_fault: Callable[[Exception], None],
) -> Governor | InprocGovernor:
    """Bring ``engine`` under control from its present step on. Call on its own thread, with no step in flight.

    Raises :class:`UnsupportedEngineError` if it cannot be controlled, and whatever else goes wrong; nothing is changed
    then. ``on_fault`` gets what goes wrong later, outside the calls of the governor.
    """
    check_launch(engine)
    manager = _cache_manager(targets, engine)
    replica = replica_of(engine)
    with contextlib.ExitStack() as undo:
        bounded = bound_pool(engine, manager, settings, on_fault)
        undo.callback(bounded.detach)
        members = member_ids(engine, replica, settings.gpu_ids)
        publish = _event_publisher(engine.scheduler, targets.event_batch)
        inproc, loop = _attach_to_loop(engine, targets, on_fault)
        if inproc is not None:
            undo.callback(inproc.detach)
        identity = _identity(targets, engine, settings, bounded)
        subscription, name = take_slot(identity, members, settings, loop.on_publication)
        undo.callback(subscription.close)
        advisor = open_advisor(engine.scheduler, bounded.cache, bounded.retention, subscription, settings.ledger_dir)
        governor = Governor(
            subscription,
            bounded,
            Alarm(loop.on_publication),
            publish_events=publish,
            wake=loop.wake,
            is_busy=loop.is_busy,
            advisor=advisor,
        )
        if inproc is not None:
            inproc.serve(governor)
        undo.pop_all()
    _log.info(
        "instance %s, replica %d: at most %d idle prefix-cache tokens of %d are kept; members %s; memory returned: %s",
        name,
        replica,
        bounded.policy.limit_tokens,
        bounded.cache.capacity_tokens(),
        ", ".join(members),
        bounded.memory.figures().returns,
    )
    return governor if inproc is None else inproc


def check_launch(engine: Any) -> None:  # noqa: ANN401
    """Raise :class:`UnsupportedEngineError` for an engine core that was started in a way that cannot be controlled."""
    if is_externally_launched(engine):
        raise UnsupportedEngineError(EXTERNALLY_LAUNCHED)


def check_early(engine: Any) -> None:  # noqa: ANN401
    """Do what can be checked while ``engine`` is still being built; raises :class:`UnsupportedEngineError`."""
    check_launch(engine)
    if not engine.vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedEngineError(CACHING_OFF)


class _Loop(NamedTuple):
    """How an engine core that idles is reached: who hears a publication, and how its loop is turned."""

    on_publication: Callable[[], None]
    wake: Callable[[], None]
    is_busy: Callable[[], bool]


def _attach_to_loop(
    engine: Any,  # noqa: ANN401
    targets: Targets,
    on_fault: Callable[[Exception], None],
) -> tuple[InprocGovernor | None, _Loop]:
    """Return the way into the engine's own loop, or a stand-in for an engine that has none."""
    if hasattr(engine, "input_queue"):
        queue = engine.input_queue
        wake = functools.partial(queue.put_nowait, targets.wakeup)
        return None, _Loop(wake, wake, lambda: not queue.empty())
    inproc = InprocGovernor(engine, on_fault)
    return inproc, _Loop(inproc.on_publication, _nothing, bool)


def _identity(
    targets: Targets,
    engine: Any,  # noqa: ANN401
    settings: Settings,
    bounded: BoundedPool,
) -> Identity:
    parallel = engine.vllm_config.parallel_config
    return Identity(
        instance_name=settings.instance_name,
        engine="vllm",
        engine_version=targets.version,
        replica=replica_of(engine),
        tp_size=int(parallel.tensor_parallel_size),
        pp_size=int(parallel.pipeline_parallel_size),
        startup_limit_tokens=bounded.policy.limit_tokens,
        block_tokens=bounded.cache.block_tokens,
        startup_cap_tokens=settings.startup_cap_tokens,
    )


def _cache_manager(targets: Targets, engine: Any) -> Any:  # noqa: ANN401
    """Return the engine's KV-cache manager if its cache can be governed, else raise :class:`UnsupportedEngineError`.

    Another pool or queue than vLLM's own may order its blocks in another way, which no check of names would find.
    """
    manager = getattr(engine.scheduler, "kv_cache_manager", None)
    if manager is None:
        reason = f"its scheduler {type(engine.scheduler).__qualname__} has no kv_cache_manager"
        raise UnsupportedEngineError(reason)
    pool = manager.block_pool
    if not manager.enable_caching or not pool.enable_caching:
        raise UnsupportedEngineError(CACHING_OFF)
    for part, known in ((pool, targets.block_pool), (pool.free_block_queue, targets.free_queue)):
        if type(part) is not known:
            reason = f"its block pool has a {type(part).__qualname__} instead of vLLM's own {known.__qualname__}"
            raise UnsupportedEngineError(reason)
    if not group_block_tokens(manager):
        reason = "none of the model's KV-cache groups can be cached"
        raise UnsupportedEngineError(reason)
    return manager


def _event_publisher(scheduler: Any, event_batch: type[Any]) -> Callable[[], None]:  # noqa: ANN401
    """Return what sends the KV events that lie in the pool; vLLM itself sends them only after a step."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    publisher = getattr(scheduler, "kv_event_publisher", None)
    if publisher is None or not getattr(pool, "enable_kv_cache_events", False):
        return _nothing

    def publish() -> None:
        if pool.kv_event_queue:
            publisher.publish(event_batch(ts=time.time(), events=manager.take_events()))

    return publish


def _nothing() -> None:
    """Stand in for events that nobody publishes and for loops that nobody has to wake."""
