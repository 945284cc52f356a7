"""SGLang's real prefix caches on small real pools, without a server around them."""

from __future__ import annotations

import os
from array import array
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CORE_VARIABLE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
LAYERS = 4
FULL_LAYERS = (1, 3)
OTHER_LAYERS = (0, 2)
WINDOW = 32


class UnavailableError(Exception):
    """The release under test has no such cache."""


@dataclass
class Cached:
    """What a scheduler has that matters to its prefix cache; stands in for the scheduler."""

    tree_cache: Any
    token_to_kv_pool_allocator: Any
    req_to_token_pool: Any
    size: int

    def insert(self, ids: Sequence[int]) -> None:
        """Put a finished sequence into the cache, making room as a scheduler does."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams  # noqa: PLC0415

        page = self.tree_cache.page_size
        ids = ids[: len(ids) // page * page]
        indices = self._allocate(len(ids))
        if indices is None:
            return
        more: dict[str, Any] = {}
        if self.tree_cache.supports_mamba():
            more["mamba_value"] = self.req_to_token_pool.mamba_allocator.alloc(1)
            if more["mamba_value"] is None:
                self.token_to_kv_pool_allocator.free(indices)
                return
        free = self.free_tokens()
        result = self.tree_cache.insert(InsertParams(key=_key(ids), value=indices.clone(), **more))
        if result.prefix_len and self.free_tokens() == free:  # some caches free what they had already, others do not
            self.token_to_kv_pool_allocator.free(indices[: result.prefix_len])
        if more and result.mamba_exist:
            self.req_to_token_pool.mamba_allocator.free(more["mamba_value"])

    def lock(self, ids: Sequence[int]) -> tuple[Any, Any]:
        """Lock the cached part of ``ids`` as a running request does; returns what :meth:`unlock` wants."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams  # noqa: PLC0415

        page = self.tree_cache.page_size
        node = self.tree_cache.match_prefix(
            MatchPrefixParams(key=_key(ids[: len(ids) // page * page]))
        ).last_device_node
        receipt = self.tree_cache.inc_lock_ref(node)
        return node, receipt.to_dec_params() if hasattr(receipt, "to_dec_params") else None

    def unlock(self, locked: tuple[Any, Any]) -> None:
        """Undo a :meth:`lock`."""
        node, receipt = locked
        self.tree_cache.dec_lock_ref(node, receipt)

    def protected_tokens(self) -> int:
        """Return how many cached tokens are locked."""
        try:
            return int(self.tree_cache.protected_size())
        except NotImplementedError:
            return int(self.tree_cache.full_protected_size())

    def free_tokens(self) -> int:
        """Return how many tokens of full attention are free."""
        allocator = self.token_to_kv_pool_allocator
        return int(getattr(allocator, "full_available_size", allocator.available_size)())

    def _allocate(self, count: int) -> torch.Tensor | None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: PLC0415

        allocator = self.token_to_kv_pool_allocator
        if allocator.available_size() < count:
            self.tree_cache.evict(EvictParams(num_tokens=count, swa_num_tokens=count))
        if allocator.available_size() < count:
            return None
        indices: torch.Tensor | None = allocator.alloc(count)
        return indices


def build(kind: str, *, page: int = 1, size: int = 4096) -> Cached:
    """Build a cache: ``unified-rust``, ``-python``, ``-swa``, ``-mamba``, or the older ``radix``, ``swa``, ``mamba``.

    Raises :class:`UnavailableError` where the installed SGLang has none of that kind.
    """
    try:
        requests, allocator, components = _pools(kind, page, size)
        tree = _tree(kind, page, requests, allocator, components)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        message = f"no {kind} cache in this release: {error}"
        raise UnavailableError(message) from error
    return Cached(tree, allocator, requests, size)


def _pools(kind: str, page: int, size: int) -> tuple[Any, Any, tuple[str, ...]]:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: PLC0415

    requests = ReqToTokenPool(size=8, max_context_len=1024, device="cpu", enable_memory_saver=False)
    if kind in ("unified-swa", "swa"):
        return requests, _sliding_window_allocator(page, size), ("FULL", "SWA")
    if kind in ("unified-mamba", "mamba"):
        requests = _mamba_requests()
        return requests, _plain_allocator(page, size), ("FULL", "MAMBA")
    return requests, _plain_allocator(page, size), ("FULL",)


def _plain_allocator(page: int, size: int) -> Any:  # noqa: ANN401
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator  # noqa: PLC0415

    more = {"dtype": torch.bfloat16, "device": "cpu", "kvcache": _NoPool(), "need_sort": False}
    if page == 1:
        return TokenToKVPoolAllocator(size, **more)
    return PagedTokenToKVPoolAllocator(size, page_size=page, **more)


class _NoPool:
    """A pool without memory: nothing here reads cached keys or values."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _sliding_window_allocator(page: int, size: int) -> Any:  # noqa: ANN401
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: PLC0415

    try:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: PLC0415
    except ImportError:
        from sglang.srt.mem_cache.swa_memory_pool import SWATokenToKVPoolAllocator  # noqa: PLC0415
    pool = SWAKVPool(
        size=size,
        size_swa=size,
        page_size=page,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=8,
        swa_attention_layer_ids=list(OTHER_LAYERS),
        full_attention_layer_ids=list(FULL_LAYERS),
        device="cpu",
    )
    return SWATokenToKVPoolAllocator(
        size=size,
        size_swa=size,
        page_size=page,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=pool,
        need_sort=False,
    )


def _mamba_requests() -> Any:  # noqa: ANN401
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape  # noqa: PLC0415
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool  # noqa: PLC0415
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: PLC0415

    args = ServerArgs(model_path="dummy", device="cpu")
    args._mamba_cache_chunk_size = 64  # else asked of the model's config, and there is no model
    set_global_server_args_for_scheduler(args)
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=32,
        n_groups=1,
        num_heads=2,
        head_dim=16,
        state_size=16,
        conv_kernel=4,
    )
    return HybridReqToTokenPool(
        size=8,
        mamba_size=64,
        mamba_spec_state_size=8,
        max_context_len=1024,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=list(OTHER_LAYERS)),
        mamba_layer_ids=list(OTHER_LAYERS),
        enable_mamba_extra_buffer=False,
        speculative_num_draft_tokens=3,
    )


def _tree(kind: str, page: int, requests: Any, allocator: Any, components: tuple[str, ...]) -> Any:  # noqa: ANN401
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: PLC0415

    params = CacheInitParams(
        disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=allocator, page_size=page
    )
    if "SWA" in components:
        params.sliding_window_size = WINDOW
    if kind == "radix":
        from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: PLC0415

        return RadixCache(params)
    if kind == "swa":
        from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache  # noqa: PLC0415

        return SWARadixCache(params)
    if kind == "mamba":
        from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache  # noqa: PLC0415

        return MambaRadixCache(params)
    from sglang.srt.mem_cache.unified_radix_cache import ComponentType, UnifiedRadixCache  # noqa: PLC0415

    params.tree_components = tuple(ComponentType[name] for name in components)
    with _core("rust" if kind == "unified-rust" else "python"):
        tree = UnifiedRadixCache(params)
    if kind == "unified-rust" and "Rust" not in type(getattr(tree, "tree_core", None)).__name__:
        message = "the tree has no core in Rust"
        raise TypeError(message)
    return tree


@contextmanager
def _core(name: str) -> Iterator[None]:
    before = os.environ.get(CORE_VARIABLE)
    os.environ[CORE_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[CORE_VARIABLE]
        else:
            os.environ[CORE_VARIABLE] = before


def _key(ids: Sequence[int]) -> Any:  # noqa: ANN401
    from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415

    return RadixKey(array("q", ids))
