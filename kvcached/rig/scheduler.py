"""Continuous batching on one rank: chunked prefill, several requests per step, decoding, no preemption.

Every decision follows from the requests and the cache alone, so ranks that are given the same requests in the same
order hold the same blocks after every step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvcached.rig.block_cache import ROOT_KEY, BlockCache, chain_keys

if TYPE_CHECKING:
    from kvcached.rig.kv_rows import KvRows
    from kvcached.workload.request import Request

DEFAULT_STEP_TOKENS = 16384
"""How many tokens one step computes at most."""

MAX_RUNNING = 64
"""How many requests are worked on in one step at most."""

DECODE_DIVISOR = 8
"""A decoding request advances by this fraction of a block per step, so that answers take several steps."""


class Sequence:
    """A request being worked on, and the blocks it holds from the head of its chain to the tail."""

    __slots__ = ("blocks", "committed", "computed", "keys", "needed", "prompt_tokens", "total_tokens")

    def __init__(self, request: Request, keys: list[int], block_tokens: int) -> None:
        """Begin ``request`` with nothing computed; ``keys`` are those of its full blocks."""
        self.keys = keys
        self.prompt_tokens = request.prompt_tokens
        self.total_tokens = request.total_tokens
        self.needed = -(-request.total_tokens // block_tokens)
        self.blocks: list[int] = []
        self.committed = 0
        self.computed = 0


@dataclass(slots=True)
class Counts:
    """What a scheduler has done so far."""

    finished: int = 0
    refused: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0


class Watcher(Protocol):
    """Whoever wants to know of requests; it changes nothing."""

    def admitted(self, sequence: Sequence) -> None:
        """Note that a request begins: its hits are acquired, and nothing more is computed."""

    def released(self, sequence: Sequence) -> None:
        """Note that a request has given its blocks back."""


class Scheduler:
    """Waiting and running requests of one rank, and the steps that work them off."""

    def __init__(self, cache: BlockCache, pages: KvRows, *, step_tokens: int = DEFAULT_STEP_TOKENS) -> None:
        """Schedule over ``cache``, computing into ``pages`` at most ``step_tokens`` tokens a step."""
        self.counts = Counts()
        self.watcher: Watcher | None = None
        """Told of each request's beginning and end."""
        self._cache = cache
        self._pages = pages
        self._step_tokens = step_tokens
        self._block_tokens = cache.block_tokens
        self._decode_tokens = max(1, cache.block_tokens // DECODE_DIVISOR)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._reserved = 0
        self._fresh: list[Sequence] = []

    @property
    def unfinished(self) -> int:
        """How many requests wait or run."""
        return len(self._waiting) + len(self._running)

    @property
    def reserved_blocks(self) -> int:
        """How many blocks the requests that run were promised and have not taken yet."""
        return self._reserved

    def add(self, request: Request) -> None:
        """Queue ``request``; one that could never fit into the cache is refused and counted."""
        sequence = Sequence(request, chain_keys(request.content), self._block_tokens)
        if sequence.needed * self._block_tokens > self._cache.capacity_tokens():
            self.counts.refused += 1
            return
        self._waiting.append(sequence)

    def step(self) -> bool:
        """Admit, compute and finish what one step holds; return whether a request released its blocks."""
        self._admit()
        budget = self._step_tokens
        decoding = [one for one in self._running if one.computed >= one.prompt_tokens]
        prefilling = [one for one in self._running if one.computed < one.prompt_tokens]
        for sequence in decoding:
            budget -= self._advance(sequence, min(self._decode_tokens, sequence.total_tokens - sequence.computed))
        for sequence in prefilling:
            if budget <= 0:
                break
            budget -= self._advance(sequence, min(budget, sequence.prompt_tokens - sequence.computed))
        self._compute()
        return self._finish()

    def _admit(self) -> None:
        """Move waiting requests into the batch in order of arrival, as long as their worst case fits."""
        while self._waiting and len(self._running) < MAX_RUNNING:
            sequence = self._waiting[0]
            # The last prompt token is always computed, because its output is what decoding starts from.
            reusable = sequence.keys[: (sequence.prompt_tokens - 1) // self._block_tokens]
            hits, idle_hits = self._cache.match(reusable)
            needed = sequence.needed - hits
            if self._reserved + needed > self._cache.available_blocks() - idle_hits:
                return
            self._reserved += needed
            self._waiting.popleft()
            self._begin(sequence, reusable[:hits])

    def _begin(self, sequence: Sequence, hit_keys: list[int]) -> None:
        sequence.blocks = self._cache.acquire(hit_keys)
        self._pages.verify(sequence.blocks, hit_keys)
        sequence.committed = len(hit_keys)
        sequence.computed = len(hit_keys) * self._block_tokens
        self.counts.hit_tokens += sequence.computed
        self.counts.prompt_tokens += sequence.prompt_tokens
        self._running.append(sequence)
        if self.watcher is not None:
            self.watcher.admitted(sequence)

    def _advance(self, sequence: Sequence, tokens: int) -> int:
        """Give ``sequence`` the blocks for its next ``tokens`` tokens; return ``tokens``."""
        sequence.computed += tokens
        missing = -(-sequence.computed // self._block_tokens) - len(sequence.blocks)
        if missing > 0:
            self._reserved -= missing
            allocate = self._cache.allocate
            fresh = [allocate() for _ in range(missing)]
            self._pages.take(fresh)
            sequence.blocks += fresh
        if sequence.computed // self._block_tokens > sequence.committed:
            self._fresh.append(sequence)
        return tokens

    def _compute(self) -> None:
        """Write all blocks that this step filled in one go, then let others find them."""
        if not self._fresh:
            return
        blocks: list[int] = []
        keys: list[int] = []
        for sequence in self._fresh:
            full = sequence.computed // self._block_tokens
            blocks += sequence.blocks[sequence.committed : full]
            keys += sequence.keys[sequence.committed : full]
        self._pages.write(blocks, keys)
        for sequence in self._fresh:
            self._commit(sequence)
        self._fresh.clear()

    def _commit(self, sequence: Sequence) -> None:
        full = sequence.computed // self._block_tokens
        keys, blocks, commit = sequence.keys, sequence.blocks, self._cache.commit
        parent = keys[sequence.committed - 1] if sequence.committed else ROOT_KEY
        for position in range(sequence.committed, full):
            key = keys[position]
            blocks[position] = commit(blocks[position], key, parent)
            parent = key
        sequence.committed = full

    def _finish(self) -> bool:
        """Release the blocks of all requests that are complete."""
        finished = [one for one in self._running if one.computed >= one.total_tokens]
        if not finished:
            return False
        self._running = [one for one in self._running if one.computed < one.total_tokens]
        for sequence in finished:
            self._cache.release(sequence.blocks)
            if self.watcher is not None:
                self.watcher.released(sequence)
        self.counts.finished += len(finished)
        return True
