"""How much of its pool an engine needs for one request of the greatest length that it accepts."""

from __future__ import annotations

import logging
from typing import Any

from kvcached.engines.vllm.prefix_cache import group_block_tokens

_log = logging.getLogger(__name__)


def floor_blocks(manager: Any, vllm_config: Any) -> int:  # noqa: ANN401 - vLLM's KVCacheManager and its VllmConfig
    """Return the blocks below which the longest request would wait for ever.

    One block more than the request takes, because a hit on all of its blocks still computes the last one, and those
    that vLLM keeps free when it admits a request.
    """
    watermark = int(getattr(manager, "watermark_blocks", 0))
    try:
        needed = _by_spec(manager, vllm_config)
    except Exception:  # noqa: BLE001 - a release that counts in another way
        _log.debug("the longest request is reckoned by its tokens alone", exc_info=True)
        longest = int(vllm_config.model_config.max_model_len)
        needed = sum(-(-longest // tokens) for tokens in group_block_tokens(manager))
    return needed + watermark + 1


def _by_spec(manager: Any, vllm_config: Any) -> int:  # noqa: ANN401
    """Return what vLLM itself reckons for its greatest concurrency: windows and states take less than all tokens."""
    blocks = 0
    for group in manager.kv_cache_config.kv_cache_groups:
        if not getattr(group, "host_resident", False):
            spec = group.kv_cache_spec
            blocks += -(-int(spec.max_memory_usage_bytes(vllm_config)) // int(spec.page_size_bytes))
    return blocks
