"""How much of its pool an engine needs for one request of the greatest length that it accepts."""

from __future__ import annotations

import logging
from typing import Any

from kvcached.engines.vllm.prefix_cache import group_block_tokens
from kvcached.guards import call_guarded

_log = logging.getLogger(__name__)


def floor_blocks(manager: Any, vllm_config: Any) -> int:  # noqa: ANN401 - vLLM's KVCacheManager and its VllmConfig
    """Return the blocks below which the longest request would wait for ever.

    One block more than the request takes, because a hit on all of its blocks still computes the last one, and those
    that vLLM keeps free when it admits a request.
    """

    def by_tokens(error: Exception) -> int:  # a release whose groups are reckoned in another way
        _log.debug("the longest request is reckoned by its tokens alone", exc_info=error)
        longest = int(vllm_config.model_config.max_model_len)
        return sum(-(-longest // tokens) for tokens in group_block_tokens(manager))

    watermark = int(getattr(manager, "watermark_blocks", 0))
    return call_guarded(by_tokens, _by_spec, manager, vllm_config) + watermark + 1


def _by_spec(manager: Any, vllm_config: Any) -> int:  # noqa: ANN401
    """Return what vLLM itself reckons for its greatest concurrency: windows and states take less than all tokens."""
    blocks = 0
    for group in manager.kv_cache_config.kv_cache_groups:
        if not getattr(group, "host_resident", False):
            spec = group.kv_cache_spec
            blocks += -(-int(spec.max_memory_usage_bytes(vllm_config)) // int(spec.page_size_bytes))
    return blocks
