"""A vLLM plugin of the tests: makes this vLLM one that lacks what kvcached needs, before kvcached looks."""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool

from kvcached.engines.vllm import register as register_kvcached


def register() -> None:
    """Take a method away that vLLM itself does without, then let kvcached look."""
    if hasattr(BlockPool, "evict_blocks"):
        del BlockPool.evict_blocks
    register_kvcached()
