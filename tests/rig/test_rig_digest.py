"""The digest that tells whether ranks ever differed: it must see a difference that has healed by the end."""

from __future__ import annotations

from kvcached.rig.block_cache import BlockCache, chain_keys
from kvcached.rig.cache_digest import CacheDigest

BLOCK_TOKENS = 16


class Rank:
    """A cache with its digest."""

    def __init__(self) -> None:
        self.cache = BlockCache(8, BLOCK_TOKENS)
        self.digest = CacheDigest(self.cache)
        self.steps = 0

    def cache_block(self, content: int) -> None:
        """Cache one block and let go of it."""
        (key,) = chain_keys((content,))
        self.cache.release([self.cache.commit(self.cache.allocate(), key, 0)])

    def end_step(self) -> str:
        """End a step and return the digest."""
        self.steps += 1
        self.digest.end_step(self.steps)
        return self.digest.hexdigest()


def test_equal_histories_have_equal_digests() -> None:
    """Two ranks that do the same at the same steps have the same digest after each."""
    ranks = Rank(), Rank()
    for content in (1, 2, 3):
        for rank in ranks:
            rank.cache_block(content)
            rank.cache.evict(16 if content == 2 else 0)
        assert ranks[0].end_step() == ranks[1].end_step()


def test_update_applied_a_step_late_is_seen() -> None:
    """A rank that evicts one step later has another digest for good, though its cache ends up the same."""
    ranks = Rank(), Rank()
    for rank in ranks:
        rank.cache_block(1)
        rank.cache_block(2)
    ranks[0].cache.evict(16)
    ranks[0].end_step()
    ranks[1].end_step()
    ranks[1].cache.evict(16)
    digests = {rank.end_step() for rank in ranks}
    assert ranks[0].cache.content == ranks[1].cache.content
    assert len(digests) == 2


def test_other_victim_is_seen() -> None:
    """Ranks that evict as much but not the same block differ."""
    ranks = Rank(), Rank()
    for rank, order in zip(ranks, ((1, 2), (2, 1)), strict=True):
        for content in order:
            rank.cache_block(content)
        rank.cache.evict(16)
    assert ranks[0].cache.idle_tokens() == ranks[1].cache.idle_tokens()
    assert ranks[0].end_step() != ranks[1].end_step()


def test_detour_within_a_step_is_seen() -> None:
    """A rank that cached and dropped a block between two steps differs, though it holds the same after both."""
    straight, detour = Rank(), Rank()
    detour.cache_block(9)
    detour.cache.evict(16)
    assert straight.cache.content == detour.cache.content
    assert straight.end_step() != detour.end_step()


def test_other_place_is_seen() -> None:
    """Ranks that hold the same keys in other blocks differ: what they evict next need not be the same."""
    ranks = Rank(), Rank()
    unused = [ranks[1].cache.allocate(), ranks[1].cache.allocate()]
    ranks[1].cache.release(unused[::-1])
    for rank in ranks:
        rank.cache_block(1)
    assert ranks[0].end_step() != ranks[1].end_step()


def test_content_summary_does_not_depend_on_the_way() -> None:
    """The summary of what is cached where is the same after a detour."""
    straight, detour = Rank(), Rank()
    straight.cache_block(1)
    detour.cache_block(9)
    detour.cache.evict(16)
    detour.cache_block(1)
    assert straight.cache.content == detour.cache.content
