"""Puts one engine core under control: finds its pool and its GPUs, registers it, and joins the parts."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from kvcached.engines.vllm.advisor_events import open_advisor
from kvcached.engines.vllm.devices import member_ids
from kvcached.engines.vllm.governor import Governor
from kvcached.engines.vllm.idle_blocks import IdleBlocks
from kvcached.engines.vllm.inproc import InprocGovernor
from kvcached.engines.vllm.prefix_cache import BlockPrefixCache, group_block_tokens
from kvcached.engines.vllm.process import is_instance_named
from kvcached.engines.vllm.targets import StartRefusedError, Targets, UnsupportedEngineError
from kvcached.policy import RetentionPolicy
from kvcached.registration import InstanceNameTakenError
from kvcached.subscription import Subscription
from kvcached.values import Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.settings import Settings

_log = logging.getLogger(__name__)

SUBSCRIPTION_ATTRIBUTE = "_kvcached_subscription"
"""Where an engine core keeps its subscription, for a last report if the plugin fails."""


def bind(targets: Targets, engine: Any, settings: Settings) -> Governor | InprocGovernor:  # noqa: ANN401 - vLLM's EngineCore
    """Bring ``engine`` under control from its present step on. Call on its own thread, with no step in flight.

    Raises :class:`UnsupportedEngineError` if it has no prefix cache to control; nothing is changed then.
    """
    manager = _cache_manager(engine)
    parallel = engine.vllm_config.parallel_config
    replica = int(getattr(engine, "engine_index", 0))
    pool = manager.block_pool
    idle = IdleBlocks(pool)
    cache = BlockPrefixCache(idle, group_block_tokens(manager))
    policy = RetentionPolicy(cache, settings.startup_limit_tokens, chunk_tokens=cache.chunk_tokens)
    identity = Identity(
        instance_name=settings.instance_name,
        engine="vllm",
        engine_version=targets.version,
        replica=replica,
        tp_size=int(parallel.tensor_parallel_size),
        pp_size=int(parallel.pipeline_parallel_size),
        startup_limit_tokens=policy.limit_tokens,
        block_tokens=cache.block_tokens,
    )
    members = member_ids(engine, replica, settings.gpu_ids)
    publish = _event_publisher(engine.scheduler, targets.event_batch)
    governor: Governor | InprocGovernor
    if hasattr(engine, "input_queue"):
        wake = functools.partial(engine.input_queue.put_nowait, targets.wakeup)
        subscription = _subscribe(identity, members, settings, wake)
        advisor = open_advisor(engine.scheduler, cache, policy, subscription, settings.ledger_dir)
        governor = Governor(subscription, policy, idle, publish_events=publish, wake=wake, advisor=advisor)
    else:
        governor = InprocGovernor(engine)
        subscription = _subscribe(identity, members, settings, governor.on_publication)
        advisor = open_advisor(engine.scheduler, cache, policy, subscription, settings.ledger_dir)
        governor.serve(Governor(subscription, policy, idle, publish_events=publish, wake=_nothing, advisor=advisor))
    engine.__dict__[SUBSCRIPTION_ATTRIBUTE] = subscription
    _log.info(
        "instance %s, replica %d: at most %d idle prefix-cache tokens of %d are kept; members %s",
        identity.instance_name,
        replica,
        policy.limit_tokens,
        cache.capacity_tokens(),
        ", ".join(members),
    )
    return governor


def _cache_manager(engine: Any) -> Any:  # noqa: ANN401
    """Return the engine's KV-cache manager if it has a prefix cache, else raise :class:`UnsupportedEngineError`."""
    manager = getattr(engine.scheduler, "kv_cache_manager", None)
    if manager is None:
        reason = f"its scheduler {type(engine.scheduler).__qualname__} has no kv_cache_manager"
        raise UnsupportedEngineError(reason)
    if not manager.enable_caching or not manager.block_pool.enable_caching:
        reason = "prefix caching is switched off"
        raise UnsupportedEngineError(reason)
    if not group_block_tokens(manager):
        reason = "none of the model's KV-cache groups can be cached"
        raise UnsupportedEngineError(reason)
    return manager


def _subscribe(
    identity: Identity,
    members: Sequence[str],
    settings: Settings,
    on_publication: Callable[[], None],
) -> Subscription:
    """Register the replica.

    A name that its operator chose and another live engine has is waited for: that may be the predecessor on its way
    out. A default name is only ever shared by engines of one application; the second goes by its own process.
    """
    subscription = Subscription(identity, members, settings.ledger_dir, on_publication=on_publication)
    try:
        subscription.start(patient=is_instance_named() and not settings.strict)
    except InstanceNameTakenError as error:
        if is_instance_named():
            raise StartRefusedError(str(error)) from error
        identity = dataclasses.replace(identity, instance_name=f"vllm-{os.getpid()}")
        subscription = Subscription(identity, members, settings.ledger_dir, on_publication=on_publication)
        subscription.start(patient=True)
    return subscription


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
