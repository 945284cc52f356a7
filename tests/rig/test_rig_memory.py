"""Ranks under cap and limit with real memory: in this process, two side by side, without a ledger."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from kvcached.memory.kernel_figures import resident_bytes
from kvcached.rig.chats import generate_chats, longest_request
from kvcached.rig.config import RigConfig
from kvcached.rig.intake import Message
from kvcached.rig.kv_rows import CorruptBlockError
from kvcached.rig.rank import Rank
from kvcached.settings import read_settings
from kvcached.values import Bound, Outcome, Update

if TYPE_CHECKING:
    from kvcached.workload.request import Request

CAPACITY = 40_960
LONGEST = 4096
FLOOR = longest_request(LONGEST)
TOKEN_BYTES = 256


def make_ranks(count: int = 1, environ: dict[str, str] | None = None, **changes: bool) -> list[Rank]:
    """Return ranks that are told the same."""
    options: dict[str, Any] = {
        "settings": read_settings("rig", {"KVCACHED_LEDGER_DIR": "/nowhere", **(environ or {})}),
        "tp_size": count,
        "pp_size": 1,
        "block_tokens": 16,
        "capacity_tokens": CAPACITY,
        "token_bytes": TOKEN_BYTES,
        "longest_tokens": FLOOR,
        "chunk_tokens": 8192,
        "step_tokens": 2048,
        "speed": None,
        "linger_s": 0.0,
        "check": True,
        "timeline": False,
        "fault_evictions": 0,
        "guards_returned": False,
    }
    ranks = [Rank(RigConfig(**options | changes), rank) for rank in range(count)]
    for rank in ranks:
        rank.start(0)
    return ranks


class Clocked:
    """Steps ranks with the same messages at times of its own."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.now_s = 0.0

    def step(self, *items: Request | Update, seconds: float = 0.01) -> None:
        self.now_s += seconds
        for rank in self.ranks:
            rank.step(Message(list(items), int(self.now_s * 1e9)))

    def settle(self) -> None:
        """Step until nothing waits, runs or is under way; nothing may hang."""
        for _ in range(100_000):
            if not any(rank.scheduler.unfinished or rank.policy.draining for rank in self.ranks):
                return
            self.step()
        pytest.fail("requests wait for blocks that nobody gives back")

    def rest(self) -> None:
        """Step as an idle engine does: while something is under way, and when memory says that it is time."""
        for _ in range(1000):
            policy = self.ranks[0].policy
            wake_at = policy.wake_at
            if wake_at is None and not policy.draining:
                return
            self.step(seconds=max(0.001, (wake_at or 0.0) - self.now_s))
        pytest.fail("an idle engine is woken for ever")


def cap(revision: int, tokens: int) -> Update:
    return Update(revision, tokens, Bound.CAP)


def regions_of(rank: Rank) -> list[Any]:
    return [rank.rows.region()]


@pytest.mark.parametrize("seed", range(6))
def test_random_caps_and_limits_at_every_few_steps_leave_hits_right_and_ranks_equal(seed: int) -> None:
    """Under a guard that kills at a touch of returned memory, all requests finish and every hit holds its tokens."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    ranks = make_ranks(2, guards_returned=True)
    clock = Clocked(ranks)
    arrivals = list(generate_chats(400, seed, LONGEST))
    revision = 0
    while arrivals or ranks[0].scheduler.unfinished:
        items: list[Request | Update] = [arrivals.pop(0).request for _ in range(min(len(arrivals), dice.randrange(3)))]
        if dice.random() < 0.3:
            revision += 1
            tokens = dice.choice([-1, 0, dice.randrange(FLOOR, CAPACITY)])
            items.append(Update(revision, tokens, dice.choice(list(Bound))))
        clock.step(*items)
    clock.settle()
    reports = [rank.report() for rank in ranks]
    assert reports[0]["digest"] == reports[1]["digest"]
    assert ranks[0].scheduler.counts.finished == 400
    assert ranks[0].scheduler.counts.hit_tokens > 0
    assert len(reports[0]["updates"]) > 10
    assert len(reports[0]["caps"]) > 10
    assert reports[0]["limit_breaches"] == 0


def test_cap_bounds_what_is_held_and_its_memory_is_back() -> None:
    """Held tokens never exceed the cap once it is applied, and the kernel has the memory of the others."""
    (rank,) = make_ranks()
    clock = Clocked([rank])
    for arrival in generate_chats(60, 1, LONGEST):
        clock.step(arrival.request)
    clock.step(cap(1, CAPACITY // 4))
    clock.settle()
    report = rank.policy.report()
    assert report.cap.outcome is Outcome.APPLIED
    assert report.idle_tokens + report.active_tokens <= CAPACITY // 4
    assert report.returned_bytes == pytest.approx(CAPACITY * 3 // 4 * TOKEN_BYTES, rel=0.01)
    assert resident_bytes(regions_of(rank)) == pytest.approx(report.resident_bytes, rel=0.02)
    for arrival in generate_chats(60, 2, LONGEST):
        clock.step(arrival.request)
    clock.settle()
    assert rank.scheduler.counts.finished == 120
    assert resident_bytes(regions_of(rank)) <= 1.02 * CAPACITY // 4 * TOKEN_BYTES
    clock.step(cap(2, -1))
    clock.settle()
    assert rank.policy.report().cap.outcome is Outcome.APPLIED
    for arrival in generate_chats(200, 3, LONGEST):
        clock.step(arrival.request)
    clock.settle()
    assert resident_bytes(regions_of(rank)) > CAPACITY // 2 * TOKEN_BYTES


def test_cap_below_the_longest_request_is_rejected() -> None:
    """The number that it takes is in the reason, and the report of the run has it."""
    (rank,) = make_ranks()
    Clocked([rank]).step(cap(1, FLOOR - 1))
    report = rank.policy.report().cap
    assert (report.outcome, str(FLOOR) in report.reason) == (Outcome.REJECTED_BELOW_FLOOR, True)


def test_burst_under_the_smallest_cap_waits_and_ends() -> None:
    """With room for one long request at a time all of them are served, one after another."""
    (rank,) = make_ranks(environ={"KVCACHED_MAX_KV_TOKENS": str(FLOOR)})
    clock = Clocked([rank])
    clock.settle()
    clock.step(*(arrival.request for arrival in generate_chats(100, 4, LONGEST)))
    clock.settle()
    assert rank.scheduler.counts.finished == 100
    assert rank.report()["max_held_tokens"] <= FLOOR
    assert rank.policy.report().cap.outcome is Outcome.STARTUP


def test_cap_below_what_requests_hold_is_reached_as_they_end() -> None:
    """While they run the cap is applying, with the number in its reason; none of them is disturbed."""
    (rank,) = make_ranks()
    clock = Clocked([rank])
    clock.step(*(arrival.request for arrival in generate_chats(100, 4, LONGEST)))
    while rank.cache.active_tokens() < CAPACITY // 2:
        clock.step()
    clock.step(cap(1, FLOOR))
    while not rank.policy.report().cap.reason:
        clock.step()
    report = rank.policy.report().cap
    assert report.outcome is Outcome.APPLYING
    assert "tokens above the cap" in report.reason
    clock.settle()
    assert rank.policy.report().cap.outcome is Outcome.APPLIED
    assert rank.scheduler.counts.finished == 100


def test_wiped_row_is_noticed() -> None:
    """The check of hits is real: memory returned under a cached block is an error at the next hit."""
    (rank,) = make_ranks()
    clock = Clocked([rank])
    request = next(generate_chats(1, 5, LONGEST)).request
    clock.step(request)
    clock.settle()
    rank.policy._memory.offer(range(CAPACITY // 16))
    rank.policy._memory.advance()
    with pytest.raises(CorruptBlockError):
        clock.step(request)


def test_idle_elastic_rank_holds_its_retained_tokens_and_nothing_else() -> None:
    """Free blocks give their memory back after the time, once at the start and again after a limit dropped."""
    (rank,) = make_ranks(environ={"KVCACHED_ELASTIC": "1", "KVCACHED_ELASTIC_AFTER": "2"})
    clock = Clocked([rank])
    clock.rest()
    assert resident_bytes(regions_of(rank)) <= 0.05 * CAPACITY * TOKEN_BYTES
    for arrival in generate_chats(200, 6, LONGEST):
        clock.step(arrival.request)
    clock.settle()
    assert resident_bytes(regions_of(rank)) > 0.8 * CAPACITY * TOKEN_BYTES
    clock.rest()
    clock.now_s += 100
    clock.step(Update(1, CAPACITY // 4))
    clock.rest()
    assert resident_bytes(regions_of(rank)) == pytest.approx(CAPACITY // 4 * TOKEN_BYTES, rel=0.05)
    assert rank.policy.wake_at is None
    hits = rank.scheduler.counts.hit_tokens
    for arrival in generate_chats(200, 6, LONGEST):
        clock.step(arrival.request)
    clock.settle()
    assert rank.scheduler.counts.finished == 400
    assert rank.scheduler.counts.hit_tokens > hits


def test_steady_load_on_elastic_memory_takes_next_to_no_returned_block() -> None:
    """After two minutes of a load that comes and goes, under 2 % of the blocks that are computed take memory again."""
    environ = {"KVCACHED_ELASTIC": "1", "KVCACHED_ELASTIC_AFTER": "5", "KVCACHED_MAX_CACHED_TOKENS": "4000"}
    (rank,) = make_ranks(environ=environ, guards_returned=True)
    clock = Clocked([rank])
    returned, active = [], []
    for arrival in generate_chats(600, 8, LONGEST):
        clock.step(arrival.request, seconds=0.02)
        for _ in range(29):
            clock.step(seconds=0.02)
        returned.append(rank.policy.report().returned_bytes)
        active.append(rank.cache.active_tokens())
    counts = rank.scheduler.counts
    computed = (counts.prompt_tokens - counts.hit_tokens) * 400 // 600
    print(f"in use {min(active[200:])} to {max(active[200:])} of {CAPACITY} tokens, {computed} computed")
    taken = sum(max(once - later, 0) for once, later in pairwise(returned[200:]))
    assert min(returned[200:]) > 0.3 * CAPACITY * TOKEN_BYTES
    assert taken < 0.02 * computed * TOKEN_BYTES


def test_disabled_rig_is_neither_capped_nor_elastic() -> None:
    """``KVCACHED_DISABLE=1`` leaves the whole pool to the engine."""
    environ = {"KVCACHED_DISABLE": "1", "KVCACHED_MAX_KV_TOKENS": str(FLOOR), "KVCACHED_ELASTIC": "1"}
    (rank,) = make_ranks(environ=environ)
    Clocked([rank]).step()
    assert (rank.cache.withheld_blocks(), rank.policy.pending, rank.policy.wake_at) == (0, False, None)
