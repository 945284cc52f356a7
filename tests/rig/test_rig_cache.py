"""The rig's paged prefix cache against a model of a few lines, and the hazards it must not have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcached.rig.block_cache import BlockCache, CacheFullError, IntegrityError, chain_keys
from kvcached.rig.kv_rows import CorruptBlockError, KvRows

BLOCK_TOKENS = 16


def cache_chain(cache: BlockCache, content: tuple[int, ...]) -> list[int]:
    """Compute ``content`` into ``cache`` as one request would; return its blocks, still held."""
    keys = chain_keys(content)
    hits, _ = cache.match(keys)
    blocks = cache.acquire(keys[:hits])
    for position in range(hits, len(keys)):
        parent = keys[position - 1] if position else 0
        blocks.append(cache.commit(cache.allocate(), keys[position], parent))
    return blocks


class ModelOfCache:
    """The same cache, slow and plain: references per cached key, and the idle keys in order."""

    def __init__(self, blocks: int) -> None:
        self.references: dict[int, int] = {}
        self.idle: list[int] = []
        self.free = blocks
        self.uncommitted = 0

    def take(self, key: int) -> None:
        """Hold a cached block."""
        if self.references[key] == 0:
            self.idle.remove(key)
        self.references[key] += 1

    def allocate(self) -> None:
        """Get a block for what is not cached."""
        if self.free == 0:
            self.evict(1)
        self.free -= 1
        self.uncommitted += 1

    def commit(self, key: int) -> None:
        """Cache what was computed."""
        self.uncommitted -= 1
        if key in self.references:
            self.free += 1
            self.take(key)
        else:
            self.references[key] = 1

    def release(self, keys: list[int]) -> None:
        """Let go of a chain, tail first."""
        for key in reversed(keys):
            self.references[key] -= 1
            if self.references[key] == 0:
                self.idle.append(key)

    def evict(self, blocks: int) -> int:
        """Drop the first idle blocks."""
        victims = self.idle[:blocks]
        del self.idle[: len(victims)]
        for key in victims:
            del self.references[key]
        self.free += len(victims)
        return len(victims)


class CacheMachine(RuleBasedStateMachine):
    """Requests begin, are computed and end in any order while idle blocks are evicted."""

    BLOCKS = 12

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(self.BLOCKS, BLOCK_TOKENS)
        self.model = ModelOfCache(self.BLOCKS)
        self.begun: list[tuple[list[int], list[int], int]] = []
        self.computed: list[tuple[list[int], list[int]]] = []

    @rule(content=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def begin(self, content: list[int]) -> None:
        """Let a request take its hits and blocks for the rest."""
        keys = chain_keys(tuple(content))
        hits, idle_hits = self.cache.match(keys)
        assert hits == sum(1 for key in keys if key in self.model.references)
        assert idle_hits == sum(1 for key in keys if key in self.model.idle)
        missing = len(keys) - hits
        if missing > self.cache.available_blocks() - idle_hits:
            return
        blocks = self.cache.acquire(keys[:hits])
        for key in keys[:hits]:
            self.model.take(key)
        for _ in range(missing):
            blocks.append(self.cache.allocate())
            self.model.allocate()
        self.begun.append((keys, blocks, hits))

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Let a request compute all its blocks."""
        keys, blocks, hits = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        for position in range(hits, len(keys)):
            parent = keys[position - 1] if position else 0
            blocks[position] = self.cache.commit(blocks[position], keys[position], parent)
            self.model.commit(keys[position])
        self.computed.append((keys, blocks))

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Let a computed request end."""
        keys, blocks = self.computed.pop(data.draw(st.integers(0, len(self.computed) - 1)))
        self.cache.release(blocks)
        self.model.release(keys)

    @rule(tokens=st.integers(0, 100))
    def evict(self, tokens: int) -> None:
        """Evict as if a limit ordered it."""
        evicted = self.cache.evict(tokens)
        assert evicted == self.model.evict(-(-tokens // BLOCK_TOKENS)) * BLOCK_TOKENS

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Compare counts, order and index with the model's."""
        self.cache.check_integrity()
        assert self.cache.idle_tokens() == len(self.model.idle) * BLOCK_TOKENS
        active = sum(1 for count in self.model.references.values() if count) + self.model.uncommitted
        assert self.cache.active_tokens() == active * BLOCK_TOKENS
        assert self.cache.available_blocks() == self.model.free + len(self.model.idle)
        assert [self.cache.match([key])[0] for key in self.model.references] == [1] * len(self.model.references)


TestCacheAgainstModel = CacheMachine.TestCase
TestCacheAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_tail_goes_before_head() -> None:
    """Evicting one block of an idle chain takes its tail and leaves the prefix usable."""
    cache = BlockCache(8, BLOCK_TOKENS)
    cache.release(cache_chain(cache, (1, 2, 3)))
    assert cache.evict(1) == BLOCK_TOKENS
    assert cache.match(chain_keys((1, 2, 3)))[0] == 2


def test_least_recently_used_chain_goes_first() -> None:
    """Of two idle chains the one released earlier is evicted first, unless it was used again."""
    cache = BlockCache(8, BLOCK_TOKENS)
    cache.release(cache_chain(cache, (1, 2)))
    cache.release(cache_chain(cache, (3, 4)))
    cache.release(cache_chain(cache, (1, 2)))
    cache.evict(2 * BLOCK_TOKENS)
    assert cache.match(chain_keys((3, 4)))[0] == 0
    assert cache.match(chain_keys((1, 2)))[0] == 2


def test_held_blocks_are_never_evicted() -> None:
    """Eviction of more than is idle takes the idle blocks and leaves all held ones."""
    cache = BlockCache(8, BLOCK_TOKENS)
    held = cache_chain(cache, (1, 2, 3))
    cache.release(cache_chain(cache, (7, 8)))
    assert cache.evict(1_000_000) == 2 * BLOCK_TOKENS
    assert cache.idle_tokens() == 0
    assert cache.active_tokens() == 3 * BLOCK_TOKENS
    assert cache.match(chain_keys((1, 2, 3)))[0] == len(held)


def test_evicted_block_loses_its_identity() -> None:
    """A block that was evicted no longer answers to its old key, and takes a new one."""
    cache = BlockCache(1, BLOCK_TOKENS)
    cache.release(cache_chain(cache, (1,)))
    cache.evict(1)
    assert cache.match(chain_keys((1,))) == (0, 0)
    cache.release(cache_chain(cache, (2,)))
    cache.check_integrity()
    assert cache.match(chain_keys((1,)))[0] == 0
    assert cache.match(chain_keys((2,)))[0] == 1


def test_equal_content_is_cached_once() -> None:
    """Two requests that computed the same block at once end up sharing one, and the other is free again."""
    cache = BlockCache(4, BLOCK_TOKENS)
    (key,) = chain_keys((5,))
    first, second = cache.allocate(), cache.allocate()
    assert cache.commit(first, key, 0) == first
    assert cache.commit(second, key, 0) == first
    assert cache.active_tokens() == BLOCK_TOKENS
    cache.check_integrity()


def test_full_cache_says_so() -> None:
    """Allocating while requests hold every block raises, and names the size."""
    cache = BlockCache(2, BLOCK_TOKENS)
    cache_chain(cache, (1, 2))
    with pytest.raises(CacheFullError, match="all 2 blocks"):
        cache.allocate()


def test_integrity_check_shows_both_sides() -> None:
    """A broken count is reported with what was counted and what was expected."""
    cache = BlockCache(4, BLOCK_TOKENS)
    cache_chain(cache, (1, 2))
    cache._references[cache._index[chain_keys((1,))[0]]] = 0
    with pytest.raises(IntegrityError, match="free \\+ idle \\+ active blocks: 3 != 4"):
        cache.check_integrity()


def test_keys_stand_for_the_whole_prefix() -> None:
    """Equal blocks after different prefixes have different keys."""
    assert chain_keys((1, 2))[0] == chain_keys((1, 3))[0]
    assert chain_keys((1, 3))[1] != chain_keys((2, 3))[1]


def test_pages_tell_a_wrong_block() -> None:
    """A hit on a block whose tensor row holds something else is an error that names the block."""
    pages = KvRows(4, BLOCK_TOKENS)
    pages.write([2, 3], [7, -8])
    pages.verify([2, 3], [7, -8])
    with pytest.raises(CorruptBlockError, match=r"\[3\]"):
        pages.verify([2, 3], [7, 9])
    assert pages._rows.dtype == torch.int64
