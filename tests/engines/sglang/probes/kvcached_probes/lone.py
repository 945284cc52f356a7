"""The failure that the plugin exists to prevent: one rank evicts, the other does not."""

from __future__ import annotations

from typing import Any

from kvcached_probes.places import SCHEDULER, hook_after, ranks_of

PERIOD = 7
"""Iterations between two evictions."""


class LoneEvictor:
    """Evicts everything idle on rank 1, now and then."""

    def __init__(self) -> None:
        self._iteration = 0

    def step(self, _result: object, scheduler: Any, *_: object) -> None:  # noqa: ANN401 - SGLang's scheduler
        """Evict if this is rank 1 and it is time."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: PLC0415 - only in schedulers

        self._iteration += 1
        idle = scheduler.tree_cache.evictable_size()
        if self._iteration % PERIOD == 0 and idle > 0 and ranks_of(scheduler)["tp"] == 1:
            scheduler.tree_cache.evict(EvictParams(num_tokens=idle))


def install() -> None:
    """Let rank 1 evict alone."""
    hook_after(f"{SCHEDULER}.process_input_requests", LoneEvictor().step)
