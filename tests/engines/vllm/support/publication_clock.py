"""A vLLM plugin of the benchmark: notes how far each revision got when, in an engine core that idles.

For each revision ``$PUBLICATION_CLOCK_REPORT`` gives the monotonic ns at which the watcher woke the core, its turn
began, the excess was evicted, and the turn ended with its acknowledgement.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.engines.vllm.governor import Governor
from kvcached.ledger.watcher import LedgerWatcher
from kvcached.policy import RetentionPolicy
from kvcached.values import Bound

if TYPE_CHECKING:
    from kvcached.values import Update

DONE: dict[int, list[int]] = {}
STAGE = {"woken": 0, "begun": 0, "evicted": 0}


def register() -> None:
    """Look at the clock at each stage."""
    on_idle, update = Governor.on_idle, RetentionPolicy.update
    start = LedgerWatcher.start
    if hasattr(on_idle, "publication_clock"):
        return

    def timed_start(self: LedgerWatcher, *, patient: bool) -> None:
        wake = self._on_publication
        assert wake is not None

        def timed_wake() -> None:
            STAGE["woken"] = time.monotonic_ns()
            wake()

        self._on_publication = timed_wake
        start(self, patient=patient)

    def timed_update(self: RetentionPolicy, taken: Update) -> None:
        update(self, taken)
        STAGE["evicted"] = time.monotonic_ns()

    def timed_on_idle(self: Governor) -> None:
        STAGE["begun"] = time.monotonic_ns()
        on_idle(self)
        now = time.monotonic_ns()
        revision = self._policy.settled_revision(Bound.LIMIT)
        if revision not in DONE and not self.draining:
            DONE[revision] = [STAGE["woken"], STAGE["begun"], STAGE["evicted"], now]
            if len(DONE) % 100 == 0:
                Path(os.environ["PUBLICATION_CLOCK_REPORT"]).write_text(json.dumps(DONE))

    timed_on_idle.publication_clock = True  # type: ignore[attr-defined]
    Governor.on_idle = timed_on_idle  # type: ignore[method-assign]
    RetentionPolicy.update = timed_update  # type: ignore[method-assign]
    LedgerWatcher.start = timed_start  # type: ignore[method-assign]
