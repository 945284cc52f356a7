"""The places in SGLang that the plugin hooks, and the check that all of them are there.

They are the same in every release that was tried (docs/engines.md). SGLang's hook registry only logs a target that it
cannot find and serves on half-patched, so the plugin resolves all of them itself before it installs the first.
"""

from __future__ import annotations

import inspect
import pkgutil

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
SCHEDULER = f"{SCHEDULER_MODULE}.Scheduler"

_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
BROADCAST = f"{_RECEIVER}._broadcast_reqs_across_ranks"
SPLIT = f"{_RECEIVER}._split_work_and_control_reqs"
INIT_DISPATCHER = f"{SCHEDULER}.init_request_dispatcher"
PROCESS_REQUESTS = f"{SCHEDULER}.process_input_requests"
RELEASE = "sglang.srt.mem_cache.common.release_kv_cache"

_LEADING_PARAMETERS = {
    BROADCAST: ("self", "recv_reqs"),
    SPLIT: ("self", "recv_reqs"),
    INIT_DISPATCHER: ("self",),
    PROCESS_REQUESTS: ("self", "recv_reqs"),
    RELEASE: ("req", "tree_cache"),
}
"""Hook targets, and the parameters that the hooks rely on by position."""

_USED = (
    "sglang.srt.mem_cache.base_prefix_cache.EvictParams",
    "sglang.srt.mem_cache.base_prefix_cache.EvictResult.num_tokens_evicted",
    "sglang.srt.plugins.hook_registry.HookRegistry",
    "sglang.srt.plugins.hook_registry.HookType",
    "sglang.utils.TypeBasedDispatcher",
)
"""What the plugin uses of SGLang besides, by name."""


def find_missing() -> list[str]:
    """Return the names that this SGLang lacks or that do not have the expected parameters; empty is good."""
    missing = [name for name, leading in _LEADING_PARAMETERS.items() if not _has_parameters(name, leading)]
    return missing + [name for name in _USED if _resolve(name) is None]


def _has_parameters(name: str, leading: tuple[str, ...]) -> bool:
    found = _resolve(name)
    if found is None or isinstance(found, type) or not callable(found):
        return False
    return tuple(inspect.signature(found).parameters)[: len(leading)] == leading


def _resolve(name: str) -> object | None:
    try:
        found: object = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None
    return found
