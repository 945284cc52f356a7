"""SGLang's real KV pools and allocators on the CPU, with what bounds a scheduler that has them; no server."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kvcached.engines.sglang.kv_memory import KvMemory
from kvcached.engines.sglang.placement import Placement
from kvcached.engines.sglang.rank_messages import CAP_CHUNK_TOKENS, Startup
from kvcached.memory.regions import Region
from kvcached.values import Bound, Update

PLACE = Placement(0, 1, 0, 0, 1, is_source=True, gpu_indices=(0,), first_gpu_index=0, gpu_index_step=1)


def heads_pool(size: int, page: int = 1, layers: int = 2) -> Any:  # noqa: ANN401 - SGLang's
    """Return a pool of separate keys and values of 8 heads of 128 in bfloat16: 4 KiB per token and layer."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: PLC0415

    sizes = {"size": size, "page_size": page, "head_num": 8, "head_dim": 128, "layer_num": layers}
    return MHATokenToKVPool(dtype=torch.bfloat16, device="cpu", enable_memory_saver=False, **sizes)


def latent_pool(size: int, page: int = 1, layers: int = 2) -> Any:  # noqa: ANN401
    """Return a pool of latent attention."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool  # noqa: PLC0415

    sizes = {"size": size, "page_size": page, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_num": layers}
    return MLATokenToKVPool(dtype=torch.bfloat16, device="cpu", enable_memory_saver=False, **sizes)


def tensors_of(pool: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """Return all tensors of a pool."""
    return [tensor for name in ("kv_buffer", "k_buffer", "v_buffer") for tensor in getattr(pool, name, None) or ()]


def regions_of(pool: Any) -> list[Region]:  # noqa: ANN401
    """Return where the tensors lie."""
    return [
        Region(tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), len(tensor)) for tensor in tensors_of(pool)
    ]


def make_allocator(size: int, page: int, *, need_sort: bool = False, pool: object = None) -> Any:  # noqa: ANN401
    """Return SGLang's allocator of ``size`` slots."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator  # noqa: PLC0415

    more = {"dtype": torch.bfloat16, "device": "cpu", "kvcache": pool, "need_sort": need_sort}
    if page == 1:
        return TokenToKVPoolAllocator(size, **more)
    return PagedTokenToKVPoolAllocator(size, page_size=page, **more)


def make_scheduler(allocator: Any, **more: Any) -> SimpleNamespace:  # noqa: ANN401
    """Return the stand-in of a scheduler, with all that a cap reads of one."""
    found: dict[str, Any] = {
        "token_to_kv_pool_allocator": allocator,
        "server_args": SimpleNamespace(),
        "invariant_checker": SimpleNamespace(max_total_num_tokens=allocator.size),
        "pool_stats_observer": SimpleNamespace(max_total_num_tokens=allocator.size),
        "max_req_len": 500,
        "chunked_req": None,
    }
    return SimpleNamespace(**{**found, **more})


@dataclass
class Capped:
    """A pool under control, without requests."""

    pool: Any
    page: int = 1
    settings: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.allocator = make_allocator(self.pool.size, self.page, pool=self.pool)
        self.scheduler = make_scheduler(self.allocator, server_args=SimpleNamespace(**(self.settings or {})))
        cache: Any = SimpleNamespace(active_tokens=lambda: 0, idle_tokens=lambda: 0, block_tokens=self.page)
        memory = KvMemory(self.scheduler, PLACE)
        self.policy = memory.build(Startup(-1), cache, -1, lambda: None)
        assert self.policy.capacity is not None, memory.no_cap
        self.capacity = self.policy.capacity
        self.slots: Any = self.capacity._pool
        self.memory: Any = self.policy._memory
        self._revision = 0

    def update(self, tokens: int) -> None:
        """Publish a cap."""
        self._revision += 1
        self.policy.update(Update(self._revision, tokens, Bound.CAP))

    def cap(self, tokens: int) -> None:
        """Publish a cap and step until nothing is left to do."""
        self.update(tokens)
        for _ in range(4 * self.pool.size // CAP_CHUNK_TOKENS + 8):
            self.policy.on_step()
        assert not self.policy.draining
