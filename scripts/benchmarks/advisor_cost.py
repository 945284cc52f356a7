"""Measures what the advisor costs: per request, per prompt block, the worst call, and memory.

What the rig's scheduler tells its advisor is recorded, and told to advisors again, several times over. These machines
are shared, so each call counts with the shortest of its times: what it takes where nothing comes in between.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import time
import tracemalloc
from typing import TYPE_CHECKING

from kvcached.advisor.curve import spaced_limits
from kvcached.advisor.estimator import Estimator
from kvcached.advisor.observer import Figures, Observer
from kvcached.advisor.page_file import PageWriter
from kvcached.advisor.sampling import SamplePlan
from kvcached.policy import RetentionPolicy
from kvcached.rig.advisor_hook import AdvisedRank
from kvcached.rig.block_cache import BlockCache
from kvcached.rig.chats import CHAT_BLOCK_TOKENS, generate_chats
from kvcached.rig.kv_rows import KvRows
from kvcached.rig.scheduler import Scheduler, Sequence
from kvcached.workload.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterable

REQUESTS = 3000
ROUNDS = 7
LARGEST = 1_000_000
LIMIT = 100_000
IN_WORK = 64
LONG_PROMPT = 32_000
LONG_PROMPTS = 200
AIM_NS_PER_BLOCK = 160.0
AIM_WORST_US = 1000.0
AIM_BYTES = 3_000_000


class Recording:
    """What a scheduler tells its watcher, to be told again."""

    def __init__(self) -> None:
        self.events: list[tuple[bool, Sequence]] = []
        self._copies: dict[Sequence, Sequence] = {}

    def admitted(self, sequence: Sequence) -> None:
        """Record a beginning, as the sequence stands now."""
        self._copies[sequence] = copy.copy(sequence)
        self.events.append((True, self._copies[sequence]))

    def released(self, sequence: Sequence) -> None:
        """Record an end."""
        known = self._copies.pop(sequence)
        known.committed = sequence.committed
        self.events.append((False, known))


def record_chats(seed: int) -> tuple[Recording, int]:
    """Run generated chats through the rig's scheduler; return the recording and the number of prompt blocks."""
    cache = BlockCache(LARGEST // CHAT_BLOCK_TOKENS, CHAT_BLOCK_TOKENS)
    scheduler = Scheduler(cache, KvRows(LARGEST // CHAT_BLOCK_TOKENS, CHAT_BLOCK_TOKENS))
    policy = RetentionPolicy(cache, LIMIT)
    scheduler.watcher = recording = Recording()
    blocks = 0
    for arrival in generate_chats(REQUESTS, seed):
        blocks += arrival.request.prompt_tokens // CHAT_BLOCK_TOKENS
        scheduler.add(arrival.request)
        while scheduler.unfinished >= IN_WORK:
            _step(scheduler, policy)
    while scheduler.unfinished:
        _step(scheduler, policy)
    return recording, blocks


def _step(scheduler: Scheduler, policy: RetentionPolicy) -> None:
    if scheduler.step():
        policy.on_release()


def record_long() -> Recording:
    """Make long prompts that nobody has seen, one after the other."""
    recording = Recording()
    blocks = LONG_PROMPT // CHAT_BLOCK_TOKENS
    for index in range(LONG_PROMPTS):
        keys = [index * 10**6 + place for place in range(blocks)]
        sequence = Sequence(Request(index, LONG_PROMPT, 0, ()), keys, CHAT_BLOCK_TOKENS)
        recording.admitted(sequence)
        sequence.committed = blocks
        recording.released(sequence)
    return recording


def shortest_times(events: Iterable[tuple[bool, Sequence]]) -> list[int]:
    """Tell the events to an advisor in each of several rounds; return each call's shortest time in ns."""
    rounds = []
    for _ in range(ROUNDS):
        estimator = Estimator(SamplePlan(CHAT_BLOCK_TOKENS), spaced_limits(CHAT_BLOCK_TOKENS, LARGEST, LIMIT))
        observer = Observer(estimator, CHAT_BLOCK_TOKENS, _figures, PageWriter("/nowhere"), lambda: None)
        rank = AdvisedRank(observer, CHAT_BLOCK_TOKENS)
        times = []
        for begins, sequence in events:
            begin = time.perf_counter_ns()
            if begins:
                rank.admitted(sequence)
            else:
                rank.released(sequence)
            times.append(time.perf_counter_ns() - begin)
        rounds.append(times)
    return [min(times) for times in zip(*rounds, strict=True)]


def _figures() -> Figures:
    return Figures(LIMIT, 0, LARGEST)


def measure_memory() -> tuple[int, int]:
    """Return the bytes that an estimator holds whose largest limit is full, and the peak on the way there.

    Prompts of 4,000 tokens; the blocks' names are made as vLLM's are, and those of samples are kept alive here alone.
    """
    tracemalloc.start()
    plan = SamplePlan(CHAT_BLOCK_TOKENS)
    estimator = Estimator(plan, spaced_limits(CHAT_BLOCK_TOKENS, LARGEST, LIMIT))
    blocks = 4000 // CHAT_BLOCK_TOKENS
    for request in range(2 * LARGEST // 4000):
        positions = plan.positions[: plan.samples_of(blocks)]
        keys = [hashlib.sha256(b"%d %d" % (request, place)).digest() for place in positions]
        estimator.admit(request, keys, blocks, 4000, 0)
        estimator.release(request, keys)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held, peak


def main() -> int:
    """Measure and print; the exit code is 0 if the aims are met."""
    recording, blocks = record_chats(201)
    times = shortest_times(recording.events)
    worst_us = max(shortest_times(record_long().events)) / 1000
    held, peak = measure_memory()
    per_block = sum(times) / blocks
    print(f"generated chats in the rig, {blocks / REQUESTS:.0f} prompt blocks of 16 tokens per request:")
    checks = {
        f"{sum(times) / REQUESTS / 1000:.1f} µs per request, {per_block:.0f} ns per prompt block "
        f"(≤ {AIM_NS_PER_BLOCK:.0f})": per_block <= AIM_NS_PER_BLOCK,
        f"{worst_us:.0f} µs for the worst call of a prompt of {LONG_PROMPT:,} tokens (≤ {AIM_WORST_US:.0f})": (
            worst_us <= AIM_WORST_US
        ),
        f"{held / 1e6:.2f} MB for a largest limit of {LARGEST:,} tokens, at most {peak / 1e6:.2f} MB "
        f"(≤ {AIM_BYTES / 1e6:.0f})": peak <= AIM_BYTES,
    }
    for text, met in checks.items():
        print(f"{'ok  ' if met else 'FAIL'} {text}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
