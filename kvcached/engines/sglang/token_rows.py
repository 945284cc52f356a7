"""Where SGLang's keys and values lie in main memory, and why their memory is not returned where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached.memory.madvise import prepare
from kvcached.memory.regions import Region

if TYPE_CHECKING:
    from collections.abc import Iterator

POOLS = (
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
)
"""The classes of pools whose tensors are known here; a subclass may have others."""

_BUFFERS = ("k_buffer", "v_buffer", "kv_buffer")
_SCALES = ("k_scale_buffer", "v_scale_buffer")

GPU_REASON = "the memory of a GPU is not returned yet"


def find_tensors(scheduler: Any) -> list[Any]:  # noqa: ANN401 - SGLang's scheduler, torch's tensors
    """Return the KV tensors of this rank, each with one row per slot; none if they may be otherwise."""
    allocator = scheduler.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    if f"{type(pool).__module__}.{type(pool).__qualname__}" not in POOLS:
        return []
    if any(getattr(pool, name, None) is not None for name in _SCALES):
        return []
    tensors = list(_buffers(pool))
    slots = allocator.size + allocator.page_size
    plain = all(len(tensor) >= slots and tensor.is_contiguous() for tensor in tensors)
    return tensors if plain else []


def row_bytes(tensors: list[Any]) -> int:
    """Return what one token takes in ``tensors``."""
    return sum(tensor.stride(0) * tensor.element_size() for tensor in tensors)


def regions_of(tensors: list[Any], slots: int, page_tokens: int) -> list[Region]:
    """Return ``tensors`` as regions of pages, the one of slot 0 included; layers that share a tensor have it once."""
    regions = {
        tensor.data_ptr(): Region(
            tensor.data_ptr(),
            tensor.stride(0) * tensor.element_size() * page_tokens,
            slots // page_tokens,
        )
        for tensor in tensors
    }
    return list(regions.values())


def find_obstacle(scheduler: Any, regions: list[Region], tensors: list[Any]) -> str:  # noqa: ANN401
    """Return why memory of ``regions`` cannot be returned, ``""`` if it can; prepares them for it in that case."""
    reason = _explain_setting(scheduler)
    if reason:
        return reason
    if not tensors:
        return f"the tensors of {type(scheduler.token_to_kv_pool_allocator.get_kvcache()).__name__} are not known"
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return GPU_REASON
    if any(tensor.is_pinned() for tensor in tensors):
        return "its memory is pinned for a GPU"
    return prepare(regions)


def _explain_setting(scheduler: Any) -> str:  # noqa: ANN401
    """Return which option of SGLang's lets others than the scheduler keep hold of the memory."""
    args = scheduler.server_args
    if getattr(args, "disaggregation_mode", "null") not in ("null", None):
        return "with prefill and decode disaggregated, its memory is registered for transfers"
    if getattr(args, "enable_hierarchical_cache", False):
        return "with a hierarchical cache, its memory is copied while requests do not use it"
    if getattr(args, "enable_lmcache", False):
        return "with LMCache, its memory is copied while requests do not use it"
    if getattr(args, "enable_memory_saver", False):
        return "with the memory saver, its memory is SGLang's own to release"
    return ""


def _buffers(pool: Any) -> Iterator[Any]:  # noqa: ANN401
    for name in _BUFFERS:
        yield from getattr(pool, name, None) or ()
