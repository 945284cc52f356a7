"""Records, per rank, every update applied and every eviction made for a limit, with the iteration it happened in."""

from __future__ import annotations

import hashlib
from typing import Any

from kvcached_probes.places import SCHEDULER, Log, hook_after, hook_around, when_placed


class Recorder:
    """Writes the events of this process."""

    def __init__(self) -> None:
        self._log: Log | None = None
        self._iteration = 0
        self._tree: Any = None

    def take(self, scheduler: Any) -> None:  # noqa: ANN401 - SGLang's scheduler
        """Begin with ``scheduler``."""
        self._log = Log(scheduler)
        self._tree = scheduler.tree_cache
        if scheduler.enable_hierarchical_cache:
            self._watch_transfers(self._tree)

    def next_iteration(self, *_: object) -> None:
        """Count an iteration; ranks of a replica run them in step."""
        self._iteration += 1

    def apply(self, _result: object, policy: Any, update: Any) -> None:  # noqa: ANN401
        """Record an update as it was applied."""
        if self._log is not None:
            self._log.write(
                event="apply",
                iteration=self._iteration,
                revision=update.revision,
                limit=update.limit_tokens,
                idle=policy.report().idle_tokens,
            )

    def evict(self, evict: Any, cache: Any, tokens: int) -> Any:  # noqa: ANN401
        """Record an eviction and what the tree held after it."""
        evicted = evict(cache, tokens)
        if self._log is not None:
            self._log.write(
                event="evict",
                iteration=self._iteration,
                asked=tokens,
                evicted=evicted,
                idle=cache.idle_tokens(),
                tree=self._digest(),
            )
        return evicted

    def _watch_transfers(self, tree: Any) -> None:  # noqa: ANN401 - SGLang's prefix cache
        """Record how many tokens become idle when transfers between the tiers complete."""
        check = tree.check_hicache_events

        def checked() -> None:
            before = tree.evictable_size()
            check()
            if tree.evictable_size() != before and self._log is not None:
                gained = tree.evictable_size() - before
                self._log.write(event="transferred", iteration=self._iteration, gained=gained)

        tree.check_hicache_events = checked

    def _digest(self) -> str:
        """Return a hash over the places of all cached tokens: equal trees on ranks in step have equal ones."""
        try:
            places = self._tree.all_values_flatten().sort().values
        except (ValueError, RuntimeError):  # older trees cannot flatten nothing
            return "empty"
        return hashlib.sha256(places.numpy().tobytes()).hexdigest()[:16]


def install() -> None:
    """Record in this process."""
    recorder = Recorder()
    when_placed(recorder.take)
    hook_after(f"{SCHEDULER}.process_input_requests", recorder.next_iteration)
    hook_after("kvcached.policy.RetentionPolicy.update", recorder.apply)
    hook_around("kvcached.engines.sglang.cache.RadixPrefixCache.evict", recorder.evict)
