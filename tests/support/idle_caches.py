"""Exact caches, one per limit, simulated block by block; seeded traffic for them and for what is compared to them."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.advisor.estimator import Estimator

Key = tuple[int, ...]


class IdleCache:
    """An engine's cache as plainly as it can be written: what is in use, and what is idle up to a limit."""

    def __init__(self, limit: int, weights: Sequence[int]) -> None:
        self.limit = limit
        self.weights = weights
        self.hits = 0
        self.idle: OrderedDict[Key, int] = OrderedDict()
        self.users: dict[Key, int] = {}

    def leading(self, keys: Sequence[Key]) -> int:
        count = 0
        while count < len(keys) and (keys[count] in self.users or keys[count] in self.idle):
            count += 1
        return count

    def admit(self, keys: Sequence[Key], hittable: int) -> None:
        self.hits += sum(self.weights[: self.leading(keys[:hittable])])
        for key in keys:
            self.idle.pop(key, None)
            self.users[key] = self.users.get(key, 0) + 1

    def release(self, held: Sequence[Key], cached: Sequence[Key]) -> None:
        for key in held:
            self.users[key] -= 1
            if not self.users[key]:
                del self.users[key]
        for index in reversed(range(len(cached))):
            if cached[index] not in self.users:
                self.idle.pop(cached[index], None)
                self.idle[cached[index]] = self.weights[index]
        self.squeeze(self.limit)

    def squeeze(self, room: int) -> None:
        while sum(self.idle.values()) > room:
            self.idle.popitem(last=False)


@dataclass(frozen=True)
class Admitted:
    """A request in progress: its prompt, and how much of it was found in the largest cache."""

    prompt: tuple[Key, ...]
    found: int


class Watcher(Protocol):
    """What the traffic is told to."""

    def admit(self, request: int, keys: Sequence[Key], hittable: int, prompt_tokens: int, hit_tokens: int) -> None: ...
    def release(self, request: int, cached: Sequence[Key]) -> None: ...
    def clear(self) -> None: ...
    def squeeze(self, room: int) -> None: ...


class Truth:
    """All the exact caches at once."""

    def __init__(self, limits: Sequence[int], weights: Sequence[int]) -> None:
        self.caches = [IdleCache(limit, weights) for limit in (0, *limits)]
        self.held: dict[int, Sequence[Key]] = {}

    def admit(self, request: int, keys: Sequence[Key], hittable: int, prompt_tokens: int, _hit_tokens: int) -> None:
        self.held[request] = keys
        for cache in self.caches:
            before = cache.hits
            cache.admit(keys, hittable)
            if prompt_tokens == 0:
                cache.hits = before

    def release(self, request: int, cached: Sequence[Key]) -> None:
        held = self.held.pop(request)
        for cache in self.caches:
            cache.release(held, cached)

    def clear(self) -> None:
        for cache in self.caches:
            cache.idle.clear()

    def squeeze(self, room: int) -> None:
        for cache in self.caches:
            cache.squeeze(room)


def chain_of(content: Sequence[int]) -> tuple[Key, ...]:
    """Return names of blocks, each of which holds all before it."""
    return tuple(tuple(content[: end + 1]) for end in range(len(content)))


def run_traffic(seed: int, events: int, truth: Truth, watcher: Watcher) -> None:
    """Let seeded requests come and go: forks, prefixes in use, repeated answers, aborts, resets, bursts."""
    rng = random.Random(seed)
    told = (truth, watcher)
    running: dict[int, Admitted] = {}
    computed: set[Key] = set()
    past: list[tuple[int, ...]] = [()]
    for request in range(events):
        if running and rng.random() < (0.7 if len(running) > 4 else 0.35):
            _end_one(rng, running, past, computed, told)
        content = _prompt(rng, past)
        keys = chain_of(content)
        hittable = rng.choice((len(keys), max(0, len(keys) - 1), rng.randint(0, len(keys)), 0))
        counted = rng.random() < 0.9
        running[request] = Admitted(keys, truth.caches[-1].leading(keys))
        for one in told:
            one.admit(request, keys, hittable, len(keys) * 16 + 3 if counted else 0, 0)
        if rng.random() < 0.01 and truth.caches[-1].idle:
            for one in told:
                one.clear()
        if rng.random() < 0.05:  # a burst of requests takes most of the pool
            room = rng.choice((0, 16, rng.randint(0, 400)))
            for one in told:
                one.squeeze(room)


def _prompt(rng: random.Random, past: list[tuple[int, ...]]) -> tuple[int, ...]:
    base = rng.choice(past[-12:] if rng.random() < 0.8 else past)
    kept = base[: rng.randint(0, len(base))] if rng.random() < 0.4 else base
    return (*kept[:18], *(rng.randrange(3) for _ in range(rng.randint(0, 4))))


def _end_one(
    rng: random.Random,
    running: dict[int, Admitted],
    past: list[tuple[int, ...]],
    computed: set[Key],
    told: tuple[Watcher, ...],
) -> None:
    request = rng.choice(list(running))
    ended = running.pop(request)
    prompt = ended.prompt[-1] if ended.prompt else ()
    way = rng.random()
    if way < 0.1:  # aborted in its prefill: what was found is there, what was not computed is not
        there = max(ended.found, sum(key in computed for key in ended.prompt))
        cached = ended.prompt[: rng.randint(there, len(ended.prompt))]
    else:
        # Few symbols, so that answers repeat each other.
        answer = (*prompt, *(rng.randrange(2) for _ in range(rng.randint(0, 3))))
        cached = chain_of(answer)
        past.append(answer)
    computed.update(cached)
    for one in told:
        one.release(request, cached)


def differences(seed: int, events: int, estimator: Estimator, weights: Sequence[int]) -> str:
    """Run traffic; return in which way an estimator that samples every block differs from the truth, or nothing."""
    estimator.plan.weights[:] = weights
    truth = Truth(estimator.limits, weights)
    run_traffic(seed, events, truth, estimator)
    estimator.fold()
    total = 0.0
    sums = [total := total + bucket for bucket in estimator.windows[0].buckets]
    exact = [float(cache.hits) for cache in truth.caches]
    if sums != exact:
        return f"hits {sums} are not {exact}"
    largest = truth.caches[-1]
    samples = (estimator.stack.idle_samples, estimator.stack.used_samples)
    if samples != (len(largest.idle), len(largest.users)):
        return f"{samples} samples are not {(len(largest.idle), len(largest.users))}"
    for request in list(truth.held):
        estimator.drop(request)
    return "samples stay in use" if estimator.stack.used_samples else ""


def weights_of(seed: int, blocks: int) -> list[int]:
    """Return the tokens of each position's block: all alike, or growing with the depth as graded samples do."""
    if seed % 2:
        return [16] * blocks
    return list(chain(repeat(16, 4), repeat(48, 6), repeat(80, blocks - 10)))
