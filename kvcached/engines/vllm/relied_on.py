"""Everything of vLLM that the plugin touches, resolved before the first hook is installed.

A release that lacks one of these is not controlled at all: half a hook is worse than none. The names were read in
vLLM 0.24 to 0.33; no version number decides anything.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NoReturn

from kvcached.engines.vllm.free_queue import POOL_METHODS, QUEUE_METHODS
from kvcached.engines.vllm.idle_blocks import IdleBlocks
from kvcached.guards import call_guarded


class UnsupportedEngineError(Exception):
    """An engine cannot be controlled; the message is the reason that users see."""


class StartRefusedError(RuntimeError):
    """``KVCACHED_STRICT=1``, and the engine cannot be controlled: it must not start."""


@dataclass(frozen=True)
class Targets:
    """vLLM's classes and constants that the hooks need."""

    version: str
    engine_core: type[Any]
    engine_core_proc: type[Any]
    block_pool: type[Any]
    free_queue: type[Any]
    event_batch: type[Any]
    wakeup: tuple[Any, None]
    """What is put into an engine core's input queue to turn its idle loop once; vLLM ignores it otherwise."""


def resolve_targets() -> Targets:
    """Find all targets in the vLLM of this process; raises :class:`UnsupportedEngineError` naming the missing one."""
    core = _module("vllm.v1.engine.core")
    engine_core = _attribute(core, "EngineCore")
    engine_core_proc = _attribute(core, "EngineCoreProc")
    for method in ("post_step", "get_supported_tasks", "shutdown"):
        _attribute(engine_core, method)
    for method in ("_notify_idle_state_callbacks", "_process_input_queue"):
        _attribute(engine_core_proc, method)
    block_pool = _attribute(_module("vllm.v1.core.block_pool"), "BlockPool")
    for method in POOL_METHODS:
        _attribute(block_pool, method)
    queue = _attribute(_module("vllm.v1.core.kv_cache_utils"), "FreeKVCacheBlockQueue")
    for method in QUEUE_METHODS:
        _attribute(queue, method)
    _attribute(_attribute(_module("vllm.v1.core.kv_cache_manager"), "KVCacheManager"), "take_events")
    request_type = _attribute(_module("vllm.v1.engine"), "EngineCoreRequestType")
    return Targets(
        version=str(getattr(_module("vllm"), "__version__", "unknown")),
        engine_core=engine_core,
        engine_core_proc=engine_core_proc,
        block_pool=block_pool,
        free_queue=queue,
        event_batch=_attribute(_module("vllm.distributed.kv_events"), "KVEventBatch"),
        wakeup=(_attribute(request_type, "WAKEUP"), None),
    )


def check_pool_model(block_pool: type[Any]) -> None:
    """Check on a pool of three blocks that frees, hits and evictions order the free queue as the count expects.

    Names alone cannot tell whether a release still keeps uncached blocks in front of cached ones. Raises
    :class:`UnsupportedEngineError` if it does not.
    """
    seen, order = call_guarded(_refuse_pool, _try_pool, block_pool)
    if [*seen, *order] != [2, 0, 1, 1, 1, 1, 1, 0, True]:
        reason = f"vLLM's BlockPool orders its free queue differently than expected ({seen}, {order})"
        raise UnsupportedEngineError(reason)


def _try_pool(block_pool: type[Any]) -> tuple[list[int], list[bool]]:
    """Return what is counted on a small pool, step by step, and whether the uncached block is handed out first."""
    pool = block_pool(4, enable_caching=True, hash_block_size=16)
    idle = IdleBlocks(pool)
    blocks = pool.get_new_blocks(3)
    for block, block_hash in zip(blocks, (b"first\0\0\0\0", b"second\0\0\0\0"), strict=False):
        block.set_block_hash(block_hash)
        pool.cached_block_hash_to_block.insert(block_hash, block)
    pool.free_blocks(blocks)
    seen = [idle.count, idle.used]
    pool.touch([blocks[0]])
    seen += [idle.count, idle.used]
    pool.free_blocks([blocks[0]])
    seen += [idle.evict(1), idle.count, idle.evict(2), idle.count]
    return seen, [pool.free_block_queue.popleft_n(3)[0] is blocks[2]]


def _refuse_pool(error: Exception) -> NoReturn:
    reason = f"vLLM's BlockPool does not work as expected ({type(error).__name__}: {error})"
    raise UnsupportedEngineError(reason) from error


def _module(name: str) -> Any:  # noqa: ANN401 - vLLM is untyped here; the package does not depend on it
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = f"{name} cannot be imported ({error})"
        raise UnsupportedEngineError(reason) from error


def _attribute(owner: Any, name: str) -> Any:  # noqa: ANN401
    try:
        return getattr(owner, name)
    except AttributeError:
        reason = f"{getattr(owner, '__qualname__', owner.__name__)} has no {name!r}"
        raise UnsupportedEngineError(reason) from None
