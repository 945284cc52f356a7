"""The count of idle blocks against vLLM's real BlockPool, without an engine."""

# ruff: noqa: ANN401 - vLLM's objects have no types here

from __future__ import annotations

import collections
import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvcached.engines.vllm.idle_blocks import CountMismatchError, IdleBlocks
from kvcached.engines.vllm.prefix_cache import BlockPrefixCache, group_block_tokens
from kvcached.engines.vllm.withheld_blocks import WithheldBlocks
from kvcached.memory.pool_memory import PoolMemory
from kvcached.memory.regions import PoolShape, rows_in
from kvcached.memory.returning import Returned

BLOCKS = 200
OPERATIONS = 20_000


def make_pool(blocks: int) -> Any:
    """Return a real pool with caching and KV events."""
    return BlockPool(blocks, enable_caching=True, hash_block_size=16, enable_kv_cache_events=True)


def scan(pool: Any) -> list[Any]:
    """Walk the free queue and check that it is one: every free block in it once, no used one, links both ways."""
    queue = pool.free_block_queue
    blocks = []
    previous, block = queue.fake_free_list_head, queue.fake_free_list_head.next_free_block
    while block is not queue.fake_free_list_tail:
        assert block.prev_free_block is previous
        assert block.ref_cnt == 0
        assert not block.is_null
        blocks.append(block)
        previous, block = block, block.next_free_block
    assert queue.fake_free_list_tail.prev_free_block is previous
    assert len(blocks) == queue.num_free_blocks == len({block.block_id for block in blocks})
    free = {block.block_id for block in pool.blocks if block.ref_cnt == 0 and not block.is_null}
    assert free == {block.block_id for block in blocks}
    return blocks


def idle(pool: Any) -> list[int]:
    """Return the ids of the idle cached blocks in the order in which vLLM would evict them."""
    return [block.block_id for block in scan(pool) if block.block_hash is not None]


class FakeTransport:
    """Says that the memory is back, of a pool that has none."""

    def __init__(self) -> None:
        self._answers: list[Returned] = []

    def send(self, runs: list[tuple[int, int]]) -> None:
        """Note the rows."""
        self._answers.append(Returned(4096 * rows_in(runs), ""))

    def replies(self) -> list[Returned]:
        """Answer all."""
        answers, self._answers = self._answers, []
        return answers


class Traffic:
    """What a scheduler does with a pool, at random: requests come, hit, grow, share and go."""

    def __init__(self, pool: Any, groups: int, seed: int, capped: Any = None) -> None:
        self.pool = pool
        self.capped = capped
        self.groups = groups
        self.random = random.Random(seed)
        self.requests: list[list[Any]] = []

    def hash(self) -> Any:
        """Return one of a few hashes, so that duplicates and hits are common."""
        key = self.random.randrange(BLOCKS * 2).to_bytes(8, "big")
        return make_block_hash_with_group_id(BlockHash(key), self.random.randrange(self.groups))

    def allocate(self) -> None:
        """Start a request: some blocks hit the cache, some are new; most of the new ones get a hash."""
        hits = []
        for _ in range(self.random.randrange(6)):
            block = self.pool.cached_block_hash_to_block.get_one_block(self.hash())
            if block is not None:
                self.pool.touch([block])
                hits.append(block)
        count = min(self.random.randrange(12), self.pool.get_num_free_blocks())
        blocks = self.pool.get_new_blocks(count)
        for block in blocks:
            if self.random.random() < 0.8:
                self.pool._insert_block_hash(self.hash(), block, num_tokens=16)
        if hits or blocks:
            self.requests.append(hits + blocks)

    def free(self) -> None:
        """End a request: its blocks go back, tail first."""
        if self.requests:
            request = self.requests.pop(self.random.randrange(len(self.requests)))
            self.pool.free_blocks(reversed(request))

    def promote(self) -> None:
        """Give a used block another hash, as a partial block that becomes full gets one."""
        used = [block for request in self.requests for block in request]
        if used:
            block = self.random.choice(used)
            self.pool._remove_cached_block_hashes(block)
            self.pool._insert_block_hash(self.hash(), block, num_tokens=16)

    def fail_load(self) -> None:
        """Drop the hashes of any blocks, used or idle, as after a KV connector's failed load."""
        self.pool.evict_blocks({self.random.randrange(1, BLOCKS) for _ in range(self.random.randrange(4))})

    def unpin(self) -> None:
        """End a request whose blocks stay readable until reused (since vLLM 0.30)."""
        if self.requests and hasattr(self.pool, "unpin_blocks"):
            request = self.requests.pop(self.random.randrange(len(self.requests)))
            self.pool.unpin_blocks(request, on_reuse=id)

    def adopt(self) -> None:
        """Take uncached free blocks back out of the middle of the queue, as a host cache's coordinator does."""
        if not hasattr(self.pool, "unpin_blocks"):
            return
        uncached = [block for block in self.pool.free_block_queue.get_all_free_blocks() if block.block_hash is None]
        if self.capped is not None:  # what was withheld is no longer anybody's
            uncached = [block for block in uncached if self.capped._memory.holds(block.block_id, not_taken_since=2)]
        taken = self.random.sample(uncached, min(len(uncached), self.random.randrange(3)))
        if taken:
            self.pool.touch(taken)
            self.requests.append(taken)

    def withhold(self) -> None:
        """Take uncached free blocks out of the pool for a cap, or give some back."""
        if self.random.random() < 0.5:
            self.capped.withhold(16 * self.random.randrange(1, 40))
        else:
            self.capped.restore(16 * self.random.randrange(1, 60))

    def reset(self) -> None:
        """Reset the prefix cache; vLLM refuses while blocks are in use."""
        self.pool.reset_prefix_cache()


@pytest.mark.parametrize("elastic", [False, True], ids=["", "victims-first"])
@pytest.mark.parametrize("holes", [False, True], ids=["regular", "holes"])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_count_equals_a_full_scan_after_every_random_operation(groups: int, *, holes: bool, elastic: bool) -> None:
    """After each of 20,000 operations the count is exact, and evictions take the oldest blocks, only idle ones.

    Blocks are withheld and given back meanwhile, and the memory of free ones is returned and taken.
    """
    seed = 1 + groups + 2 * holes + elastic
    print(f"seed {seed}")
    pool = make_pool(BLOCKS)
    counter = IdleBlocks(pool)
    counter.reuses_victims_first = elastic
    memory = PoolMemory(PoolShape(BLOCKS, 4096), FakeTransport())
    counter.follow_memory(memory)
    capped = WithheldBlocks(pool, counter, BlockPrefixCache(counter, [16]), memory, floor_blocks=1)
    traffic = Traffic(pool, groups, seed, capped)
    operations = [traffic.allocate] * 8 + [traffic.free] * 7 + [traffic.promote, traffic.withhold]
    if holes:
        operations += [traffic.fail_load, traffic.unpin]
        traffic.allocate()
        traffic.unpin()  # from the first unpinned block on
        operations += [traffic.adopt]
    for _ in range(OPERATIONS):
        draw = traffic.random.random()
        if draw < 0.1:
            before = idle(pool)
            wanted = traffic.random.choice([0, 1, 2, 10, BLOCKS])
            pool.take_events()
            assert counter.evict(wanted) == min(wanted, len(before))
            assert idle(pool) == before[wanted:]
        elif draw < 0.101:
            while traffic.requests:
                traffic.free()
            capped.restore_all()
            traffic.reset()
        elif draw < 0.15:
            memory.offer(capped.rows_after(traffic.random.randrange(BLOCKS)))
        else:
            traffic.random.choice(operations)()
        memory.advance()
        free = scan(pool)
        assert counter.count == len(idle(pool))
        assert counter.used == BLOCKS - 1 - len(free) - capped.withheld_rows()
        assert counter.uncached <= len(free) - counter.count
        assert capped.withheld_tokens() == 16 * capped.withheld_rows()
        gone = {row for row in range(BLOCKS) if not memory.holds(row, not_taken_since=2)}
        held = {block.block_id for block in free} | {block.block_id for block in capped._withheld}
        assert gone <= held  # no block that a request holds is offered or returned
        assert counter.check(lambda: True)


def test_a_check_gives_way_and_finds_a_wrong_count() -> None:
    """A walk over a large queue ends when it is in the way, and else tells a count that is wrong."""
    pool = make_pool(10_000)
    counter = IdleBlocks(pool)
    assert counter.check(lambda: False) is True
    assert counter.check(lambda: True) is False
    counter._free.front -= 1
    with pytest.raises(
        CountMismatchError, match="1 of 9999 free blocks were counted as idle, and a walk finds 0 of 9999"
    ):
        counter.check(lambda: False)
    assert counter.check(lambda: True) is False


def test_groups_with_another_pool_do_not_count() -> None:
    """A group that keeps its blocks in the host's memory is no part of what a block of this pool is worth."""
    pool, host = make_pool(10), make_pool(10)
    groups = [
        SimpleNamespace(block_size=size, block_pool=where) for size, where in ((16, pool), (16, host), (64, pool))
    ]
    manager = SimpleNamespace(block_pool=pool, coordinator=SimpleNamespace(single_type_managers=groups))
    assert group_block_tokens(manager) == [16, 64]


def test_a_pool_that_was_let_go_has_its_own_methods() -> None:
    """After the end of the control nothing of ours is left on pool and queue, also where one followed since later."""
    pool = make_pool(BLOCKS)
    before = [set(vars(each)) for each in (pool, pool.free_block_queue)]
    counter = IdleBlocks(pool)
    traffic = Traffic(pool, groups=1, seed=7)
    for _ in range(100):
        traffic.random.choice([traffic.allocate, traffic.free, traffic.unpin, traffic.adopt])()
    assert [set(vars(each)) for each in (pool, pool.free_block_queue)] != before
    counter.detach()
    assert [set(vars(each)) for each in (pool, pool.free_block_queue)] == before


@pytest.mark.parametrize("groups", [1, 3])
def test_the_free_queue_keeps_uncached_blocks_in_front_of_cached_ones(groups: int) -> None:
    """Without failed loads no eviction of ours leaves an uncached block behind a cached one."""
    pool = make_pool(BLOCKS)
    counter = IdleBlocks(pool)
    traffic = Traffic(pool, groups, seed=3)
    for _ in range(2_000):
        traffic.random.choice([traffic.allocate, traffic.free])()
        counter.evict(traffic.random.randrange(4))
        cached = [block.block_hash is not None for block in scan(pool)]
        assert cached == sorted(cached)


def test_an_eviction_emits_the_events_of_vllms_own_eviction() -> None:
    """The removal events of our eviction equal, item for item, those of vLLM's own eviction of the same blocks."""
    events = []
    for evict in (lambda pool: IdleBlocks(pool).evict(20), lambda pool: pool.get_new_blocks(20)):
        pool = make_pool(21)
        traffic = Traffic(pool, groups=2, seed=4)
        blocks = pool.get_new_blocks(20)
        for block in blocks:
            pool._insert_block_hash(traffic.hash(), block, num_tokens=16)
        pool.free_blocks(reversed(blocks))
        pool.take_events()
        evict(pool)
        events.append(pool.take_events())
    assert events[0] == events[1]
    assert len(events[0]) == 20


def test_an_evicted_block_can_be_cached_again_and_its_old_hash_misses() -> None:
    """A victim loses its identity everywhere: no hash, no entry in the map, and another prefix can take the block."""
    pool = make_pool(10)
    counter = IdleBlocks(pool)
    first, second = (make_block_hash_with_group_id(BlockHash(key), 0) for key in (b"first", b"second"))
    (block,) = pool.get_new_blocks(1)
    pool._insert_block_hash(first, block, num_tokens=16)
    pool.free_blocks([block])
    assert counter.evict(1) == 1
    assert block.block_hash is None
    assert pool.cached_block_hash_to_block.get_one_block(first) is None
    (again,) = (each for each in pool.get_new_blocks(9) if each is block)
    pool._insert_block_hash(second, again, num_tokens=16)
    assert pool.cached_block_hash_to_block.get_one_block(first) is None
    assert pool.cached_block_hash_to_block.get_one_block(second) is block


def test_a_raising_eviction_leaves_the_count_right() -> None:
    """What the pool raises half-way comes through, and the count is exact afterwards."""
    pool = make_pool(BLOCKS)
    blocks = pool.get_new_blocks(50)
    traffic = Traffic(pool, groups=1, seed=5)
    for block in blocks:
        pool._insert_block_hash(traffic.hash(), block, num_tokens=16)
    pool.free_blocks(blocks)
    calls = collections.Counter[str]()
    stock = pool._maybe_evict_cached_block

    def fail_at_the_fifth(block: Any) -> bool:
        calls["evict"] += 1
        if calls["evict"] == 5:
            raise RuntimeError
        return bool(stock(block))

    pool._maybe_evict_cached_block = fail_at_the_fifth
    counter = IdleBlocks(pool)
    with pytest.raises(RuntimeError):
        counter.evict(20)
    assert counter.count == len(idle(pool)) == 46
    assert counter.evict(100) == 46


def test_a_free_block_that_somebody_takes_out_of_the_queue_is_noticed() -> None:
    """Should a release touch an uncached free block, the next eviction counts afresh and takes the right blocks."""
    pool = make_pool(BLOCKS)
    counter = IdleBlocks(pool)
    traffic = Traffic(pool, groups=1, seed=6)
    blocks = pool.get_new_blocks(50)
    for block in blocks[:30]:
        pool._insert_block_hash(traffic.hash(), block, num_tokens=16)
    pool.free_blocks(blocks)
    pool.touch([counter._free.boundary])
    expected = idle(pool)
    assert counter.evict(10) == 10
    assert idle(pool) == expected[10:]
    assert counter.count == len(idle(pool))
