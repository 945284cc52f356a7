"""The cap of one process: blocks that are taken out of its pool, and given back."""

from __future__ import annotations

import random

import pytest

from kvcached.capacity import CapacityPolicy
from kvcached.memory.pool_memory import PoolMemory
from kvcached.memory.regions import PoolShape
from kvcached.policy import RetentionPolicy
from kvcached.replica_policy import ReplicaPolicy
from kvcached.values import Bound, Outcome, Update

BLOCK = 16
POOL = 1600
FLOOR = 160


class ToyPool:
    """A pool and its prefix cache that are four numbers, in blocks."""

    block_tokens = BLOCK

    def __init__(self, active: int = 0, idle: int = 0) -> None:
        self.active, self.idle, self.withheld = active, idle, 0
        self.error: Exception | None = None
        self.calls: list[tuple[str, int]] = []

    @property
    def free(self) -> int:
        return POOL // BLOCK - self.active - self.idle - self.withheld

    def idle_tokens(self) -> int:
        return self.idle * BLOCK

    def active_tokens(self) -> int:
        return self.active * BLOCK

    def capacity_tokens(self) -> int:
        return POOL

    def pool_tokens(self) -> int:
        return POOL

    def floor_tokens(self) -> int:
        return FLOOR

    def free_tokens(self) -> int:
        return self.free * BLOCK

    def withheld_tokens(self) -> int:
        return self.withheld * BLOCK

    def evict(self, tokens: int) -> int:
        return self._move("evict", min(-(-tokens // BLOCK), self.idle), idle=-1)

    def withhold(self, tokens: int) -> int:
        return self._move("withhold", min(-(-tokens // BLOCK), self.free), withheld=1)

    def restore(self, tokens: int) -> int:
        return self._move("restore", min(tokens // BLOCK, self.withheld), withheld=-1)

    def _move(self, name: str, blocks: int, idle: int = 0, withheld: int = 0) -> int:
        if self.error is not None:
            raise self.error
        self.idle += idle * blocks
        self.withheld += withheld * blocks
        self.calls.append((name, blocks))
        return blocks * BLOCK


class ToyMemory:
    """Memory that is on its way for as long as a test wants."""

    busy = False


def cap(revision: int, tokens: int) -> Update:
    return Update(revision, tokens, Bound.CAP)


def make(pool: ToyPool, startup: int = -1, chunk_tokens: int = 65536) -> tuple[CapacityPolicy, ToyMemory]:
    memory = ToyMemory()
    retention = RetentionPolicy(pool, -1, chunk_tokens=chunk_tokens)
    return CapacityPolicy(pool, retention, memory, startup, chunk_tokens=chunk_tokens), memory


@pytest.mark.parametrize(
    ("tokens", "withheld"), [(-1, 0), (160, 90), (161, 90), (175, 90), (176, 89), (1599, 1), (1600, 0), (99999, 0)]
)
def test_cap_leaves_at_most_its_tokens_in_the_pool(tokens: int, withheld: int) -> None:
    """Whole blocks are withheld, one more rather than one less; -1 and whatever is above the pool withhold none."""
    pool = ToyPool()
    policy, _ = make(pool)
    policy.update(cap(1, tokens))
    assert (pool.withheld, policy.report().outcome, policy.cap_tokens) == (withheld, Outcome.APPLIED, tokens)


def test_cap_below_the_floor_is_rejected_with_the_number_and_the_old_one_stays() -> None:
    """A request of the greatest length has to fit; who asks for less is told how much that is."""
    pool = ToyPool()
    policy, _ = make(pool)
    policy.update(cap(1, 800))
    for tokens in (159, 16, 0):
        policy.update(cap(2 + 159 - tokens, tokens))
        report = policy.report()
        assert (report.outcome, report.applied, pool.withheld) == (Outcome.REJECTED_BELOW_FLOOR, cap(1, 800), 50)
        assert "160 tokens" in report.reason
    policy.on_release()
    assert policy.report().outcome is Outcome.REJECTED_BELOW_FLOOR
    policy.update(cap(1000, 160))
    assert policy.report().outcome is Outcome.APPLIED


def test_free_blocks_go_before_idle_ones_and_active_ones_as_they_end() -> None:
    """A cap takes what is free, evicts what it still lacks, and waits for the requests."""
    pool = ToyPool(active=30, idle=50)
    policy, _ = make(pool)
    policy.update(cap(1, 80 * BLOCK))
    assert pool.calls == [("withhold", 20)]
    policy.update(cap(2, 60 * BLOCK))
    assert (pool.idle, pool.withheld, pool.calls[1:]) == (30, 40, [("evict", 20), ("withhold", 20)])
    policy.update(cap(3, 10 * BLOCK))
    report = policy.report()
    assert (pool.idle, pool.withheld, report.outcome, policy.draining) == (0, 70, Outcome.APPLYING, True)
    policy.on_step()
    assert policy.draining is False
    assert "320 tokens above the cap" in policy.report().reason
    pool.active = 10
    policy.on_release()
    assert (pool.withheld, policy.report().outcome, policy.report().reason) == (90, Outcome.APPLIED, "")


def test_nothing_is_tried_by_the_clock_while_requests_hold_the_blocks() -> None:
    """Steps without a release call nothing of the engine's."""
    pool = ToyPool(active=100)
    policy, _ = make(pool)
    policy.update(cap(1, 160))
    policy.on_step()
    calls = len(pool.calls)
    for _ in range(1000):
        policy.on_step()
    assert len(pool.calls) == calls


def test_blocks_move_in_equal_chunks_both_ways() -> None:
    """One step moves a fixed number of tokens, visibly, until all are moved."""
    pool = ToyPool(idle=100)
    policy, _ = make(pool, chunk_tokens=20 * BLOCK)
    policy.update(cap(1, 10 * BLOCK))
    outcomes = [policy.report().outcome]
    while policy.draining:
        policy.on_step()
        outcomes.append(policy.report().outcome)
    assert outcomes == [Outcome.APPLYING] * 4 + [Outcome.APPLIED]
    assert [blocks for name, blocks in pool.calls if name == "withhold"] == [20, 20, 20, 20, 10]
    policy.update(cap(2, -1))
    while policy.draining:
        policy.on_step()
    assert [blocks for name, blocks in pool.calls if name == "restore"] == [20, 20, 20, 20, 10]
    assert (pool.withheld, policy.report().outcome) == (0, Outcome.APPLIED)


def test_applied_means_that_the_memory_is_back() -> None:
    """As long as memory is on its way the cap is applying and keeps the engine stepping."""
    pool = ToyPool()
    policy, memory = make(pool)
    memory.busy = True
    policy.update(cap(1, 800))
    policy.on_step()
    assert (pool.withheld, policy.report().outcome, policy.draining) == (50, Outcome.APPLYING, True)
    memory.busy = False
    policy.on_step()
    assert (policy.report().outcome, policy.draining) == (Outcome.APPLIED, False)


def test_lifted_cap_gives_all_blocks_back_and_takes_them_again() -> None:
    """While the engine sleeps its pool is whole, whatever is published; afterwards the newest cap holds."""
    pool = ToyPool()
    policy, _ = make(pool, chunk_tokens=BLOCK)
    policy.update(cap(1, 800))
    while policy.draining:
        policy.on_step()
    policy.lift()
    assert (pool.withheld, policy.report().outcome) == (0, Outcome.APPLYING)
    policy.update(cap(2, 480))
    policy.on_release()
    policy.on_step()
    assert (pool.withheld, "lifted" in policy.report().reason) == (0, True)
    policy.resume()
    while policy.draining:
        policy.on_step()
    assert (pool.withheld, policy.report().applied, policy.report().outcome) == (70, cap(2, 480), Outcome.APPLIED)


def test_startup_cap_is_taken_by_the_first_steps() -> None:
    """The startup cap needs no publication and is shown as such."""
    pool = ToyPool()
    policy, _ = make(pool, startup=800)
    assert (pool.withheld, policy.draining, policy.report().applied) == (0, True, cap(0, 800))
    policy.on_step()
    assert (pool.withheld, policy.report().outcome, policy.draining) == (50, Outcome.STARTUP, False)


def test_startup_cap_below_the_floor_is_refused_aloud(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that could not serve a long request is not started into that: it uses its whole pool and says so."""
    pool = ToyPool()
    policy, _ = make(pool, startup=16)
    policy.on_step()
    policy.on_release()
    assert (pool.withheld, policy.cap_tokens, policy.report().outcome) == (0, -1, Outcome.REJECTED_BELOW_FLOOR)
    assert "one longest request needs 160 tokens" in caplog.text


def test_failing_pool_is_noted_and_retried_at_release_only(caplog: pytest.LogCaptureFixture) -> None:
    """The cap stays stored, serving goes on, and the next release tries again; steps in between do not."""
    pool = ToyPool(active=10)
    policy, _ = make(pool)
    pool.error = RuntimeError("pool is upset")
    policy.update(cap(1, 800))
    for _ in range(100):
        policy.on_step()
    assert (policy.report().outcome, policy.report().reason) == (
        Outcome.EVICTION_FAILED,
        "RuntimeError: pool is upset",
    )
    policy.on_release()
    assert len(caplog.records) == 1
    pool.error = None
    policy.on_release()
    assert (pool.withheld, policy.report().outcome) == (50, Outcome.APPLIED)


def test_repeated_and_older_updates_are_ignored() -> None:
    """Delivering a cap twice, or one that is overtaken, changes nothing."""
    pool = ToyPool()
    policy, _ = make(pool)
    policy.update(cap(5, 800))
    for stale in (cap(5, 160), cap(4, -1)):
        policy.update(stale)
        policy.reject(stale, Outcome.REJECTED_INVALID, "stale")
    assert (pool.withheld, policy.report().applied, policy.report().outcome) == (50, cap(5, 800), Outcome.APPLIED)


def joined(pool: ToyPool, chunk_tokens: int = 65536, *, capped: bool = True) -> ReplicaPolicy:
    retention = RetentionPolicy(pool, -1, chunk_tokens=chunk_tokens)
    memory = PoolMemory(PoolShape(POOL // BLOCK, 4096), None, "its memory is on a GPU")
    capacity = CapacityPolicy(pool, retention, memory, chunk_tokens=chunk_tokens)
    return ReplicaPolicy(
        retention, capacity if capped else None, memory, token_bytes=256, no_cap_reason="the pool cannot be capped"
    )


def test_revisions_of_limit_and_cap_do_not_mix() -> None:
    """A cap's revision settles no limit and the other way round."""
    pool = ToyPool(idle=80)
    policy = joined(pool)
    policy.update(cap(7, 1280))
    policy.update(Update(3, 160))
    report = policy.report()
    assert (report.applied, report.cap.applied) == (Update(3, 160), cap(7, 1280))
    assert (policy.settled_revision(Bound.LIMIT), policy.settled_revision(Bound.CAP)) == (3, 7)
    assert (pool.idle, pool.withheld) == (10, 20)
    assert (report.pool_bytes, report.returned_bytes, report.returns) == (409600, 0, "its memory is on a GPU")


def test_engine_that_cannot_be_capped_refuses_a_cap_aloud_and_takes_limits() -> None:
    """The cap's report tells why, once per revision, and the limit works."""
    pool = ToyPool(idle=80)
    policy = joined(pool, capped=False)
    policy.update(cap(4, 800))
    policy.update(Update(1, 0))
    report = policy.report()
    assert (report.cap.outcome, report.cap.settled_revision) == (Outcome.UNSUPPORTED_ENGINE, 4)
    assert (report.cap.reason, report.cap.applied.limit_tokens, pool.idle) == ("the pool cannot be capped", -1, 0)


class Turn:
    """One event that all ranks meet alike."""

    def __init__(self, revision: int, dice: random.Random, *, lifted: bool) -> None:
        self.kind = dice.choice(["cap", "limit", "lift", "grow", "grow", "release", "release"])
        self.revision, self.lifted = revision, lifted
        self.tokens = dice.choice([-1, 0, dice.randrange(POOL + 100)])
        self.grown, self.ended, self.kept = dice.randrange(12), dice.random(), dice.randrange(2)

    def happen(self, pool: ToyPool, policy: ReplicaPolicy) -> None:
        if self.kind in ("cap", "limit"):
            policy.update(Update(self.revision, self.tokens, Bound(self.kind)))
        elif self.kind == "lift":
            (policy.resume if self.lifted else policy.lift)()
        elif self.kind == "grow":
            pool.active += min(self.grown, pool.free)
        else:
            released = round(pool.active * self.ended)
            pool.active -= released
            pool.idle += released * self.kept
            policy.on_release()
        policy.on_step()
        assert min(pool.free, pool.idle, pool.active, pool.withheld) >= 0


def end_all_requests(pool: ToyPool, policy: ReplicaPolicy) -> None:
    policy.resume()
    pool.active = 0
    policy.on_release()
    while policy.draining:
        policy.on_step()


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences_end_where_a_plain_reference_says(seed: int) -> None:
    """After any sequence of updates, requests, lifts and steps, two ranks agree and both bounds are kept."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    pools = [ToyPool(), ToyPool()]
    chunk_tokens = dice.choice([BLOCK, 5 * BLOCK, 65536])
    policies = [joined(pool, chunk_tokens) for pool in pools]
    newest = {"limit": -1, "cap": -1}
    lifted = False
    for revision in range(1, 400):
        turn = Turn(revision, dice, lifted=lifted)
        for pool, policy in zip(pools, policies, strict=True):
            turn.happen(pool, policy)
        assert vars(pools[0]) == vars(pools[1])
        assert policies[0].report() == policies[1].report()
        lifted = lifted != (turn.kind == "lift")
        if turn.kind == "limit" or (turn.kind == "cap" and not 0 <= turn.tokens < FLOOR):
            newest[turn.kind] = turn.tokens
    for pool, policy in zip(pools, policies, strict=True):
        end_all_requests(pool, policy)
        assert pool.withheld == (0 if newest["cap"] < 0 else max(POOL // BLOCK - newest["cap"] // BLOCK, 0))
        assert newest["limit"] < 0 or pool.idle_tokens() <= max(newest["limit"], BLOCK if newest["limit"] else 0)


def test_capped_replica_at_rest_calls_nothing_of_the_engine() -> None:
    """A step with nothing to do looks at one flag."""
    pool = ToyPool()
    policy = joined(pool)
    policy.update(cap(1, 800))
    while policy.draining:
        policy.on_step()
    calls = len(pool.calls)
    for _ in range(1000):
        policy.on_step()
    assert (len(pool.calls), policy.pending) == (calls, False)
