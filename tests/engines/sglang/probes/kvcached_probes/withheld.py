"""Records, per rank, which pages a cap takes out of the pool and puts back, with the iteration it happened in."""

from __future__ import annotations

import hashlib
from typing import Any

from kvcached_probes.places import SCHEDULER, Log, hook_after, when_placed


class Watch:
    """Writes what happens in this process."""

    def __init__(self) -> None:
        self._log: Log | None = None
        self._iteration = 0
        self._allocator: Any = None

    def take(self, scheduler: Any) -> None:  # noqa: ANN401 - SGLang's scheduler
        """Begin with ``scheduler``."""
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._log = Log(scheduler)

    def next_iteration(self, *_: object) -> None:
        """Count an iteration; ranks of a replica run them in step."""
        self._iteration += 1

    def taken(self, pages: list[int], slots: Any, _asked: int) -> None:  # noqa: ANN401 - FreeSlots
        """Record pages taken out."""
        self._write("out", len(pages), slots)

    def put(self, pages: int, slots: Any, _asked: int) -> None:  # noqa: ANN401 - FreeSlots
        """Record pages put back."""
        self._write("back", pages, slots)

    def _write(self, event: str, pages: int, slots: Any) -> None:  # noqa: ANN401
        if self._log is None or not pages:
            return
        lists = repr((self._allocator.free_pages.tolist(), list(slots.out_numbers())))
        digest = hashlib.sha256(lists.encode()).hexdigest()[:16]
        self._log.write(event=event, iteration=self._iteration, pages=pages, lists=digest)


def install() -> None:
    """Record in this process."""
    watch = Watch()
    when_placed(watch.take)
    hook_after(f"{SCHEDULER}.process_input_requests", watch.next_iteration)
    hook_after("kvcached.engines.sglang.free_slots.FreeSlots.take_out", watch.taken)
    hook_after("kvcached.engines.sglang.free_slots.FreeSlots.put_back", watch.put)
