"""vLLM's block pool as a prefix cache that the policy can govern, in tokens.

A pool serves all KV-cache groups of a model, and a block of any group takes the same memory. A token is the share of
the pool that one token takes which is cached in *every* group: a block is worth ``1 / (sum of 1 / block size over the
groups)`` tokens, with one group the block size, with G groups of equal block size a G-th of it. A prefix of which some
group keeps only a part (a sliding window keeps its window) therefore counts for less than its length.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.engines.vllm.idle_blocks import IdleBlocks

CHUNK_BLOCKS = 1024
"""How many blocks one step evicts at most: under 1 ms, or 3 ms where KV events are on."""


class BlockPrefixCache:
    """The idle blocks of one pool, counted and evicted in tokens. Fulfils ``kvcached.policy.PrefixCache``."""

    def __init__(self, idle: IdleBlocks, group_block_tokens: Sequence[int]) -> None:
        """Measure ``idle`` by the block sizes, in tokens, of the model's KV-cache groups."""
        self._idle = idle
        blocks_per_token = sum((Fraction(1, tokens) for tokens in group_block_tokens), start=Fraction(0))
        self._numerator, self._denominator = blocks_per_token.denominator, blocks_per_token.numerator
        self._block_tokens = max(group_block_tokens)

    @property
    def block_tokens(self) -> int:
        """The smallest amount kept by a positive limit: one block in each group."""
        return self._block_tokens

    @property
    def chunk_tokens(self) -> int:
        """What one step may evict at most: ``CHUNK_BLOCKS`` blocks."""
        return max(1, CHUNK_BLOCKS * self._numerator // self._denominator)

    def idle_tokens(self) -> int:
        """Return the tokens of cached blocks that no request uses, rounded up."""
        return self.tokens_up(self._idle.count)

    def active_tokens(self) -> int:
        """Return the tokens' worth of blocks that requests hold."""
        return self.tokens_up(self._idle.used)

    def capacity_tokens(self) -> int:
        """Return the tokens' worth of all blocks."""
        return self.tokens_down(self._idle.total)

    def evict(self, tokens: int) -> int:
        """Evict the least recently used idle blocks that are worth ``tokens``, rounded up to whole blocks."""
        return self.tokens_up(self._idle.evict(self.blocks_up(tokens)))

    def tokens_up(self, blocks: int) -> int:
        """Return what ``blocks`` are worth in tokens, rounded up."""
        return -(-blocks * self._numerator // self._denominator)

    def tokens_down(self, blocks: int) -> int:
        """Return what ``blocks`` are worth in tokens, rounded down."""
        return blocks * self._numerator // self._denominator

    def blocks_up(self, tokens: int) -> int:
        """Return how many blocks are worth at least ``tokens``."""
        return -(-tokens * self._denominator // self._numerator)

    def blocks_down(self, tokens: int) -> int:
        """Return how many blocks are worth at most ``tokens``."""
        return tokens * self._denominator // self._numerator

    def token_bytes(self, block_bytes: int) -> int:
        """Return what one token takes of memory where a block takes ``block_bytes``, rounded up."""
        return -(-block_bytes * self._denominator // self._numerator)


def group_block_tokens(manager: Any) -> list[int]:  # noqa: ANN401 - vLLM's KVCacheManager
    """Return the block sizes, in tokens, of the groups of ``manager`` whose blocks its pool can cache.

    A group may keep its blocks in a pool of its own, in the host's memory; those are none of the blocks counted here.
    """
    sizes = []
    for single in manager.coordinator.single_type_managers:
        spec = getattr(single, "kv_cache_spec", None)
        here = getattr(single, "block_pool", manager.block_pool) is manager.block_pool
        if here and getattr(spec, "prefix_cacheable", True):
            sizes.append(int(single.block_size))
    return sizes
