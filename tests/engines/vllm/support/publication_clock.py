"""A vLLM plugin of the benchmark: notes when the engine core was done with each revision while it idled."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from kvcached.engines.vllm.governor import Governor

DONE: dict[int, int] = {}


def register() -> None:
    """Look at the clock after each idle turn that settled a revision and has nothing left to evict."""
    stock = Governor.on_idle
    if hasattr(stock, "publication_clock"):
        return

    def timed(self: Governor) -> None:
        stock(self)
        now = time.monotonic_ns()
        revision = self._policy.settled_revision
        if revision not in DONE and not self.draining:
            DONE[revision] = now
            if len(DONE) % 100 == 0:
                Path(os.environ["PUBLICATION_CLOCK_REPORT"]).write_text(json.dumps(DONE))

    timed.publication_clock = True  # type: ignore[attr-defined]
    Governor.on_idle = timed  # type: ignore[method-assign]
