"""Records when each update was applied on each rank, and when the iterations before it ended."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from kvcached_probes.places import SCHEDULER, Log, hook_after, when_placed

KEPT = 64
"""How many iterations back are kept."""


class Timer:
    """Writes the times of this process, by the clock that all processes of a machine share."""

    def __init__(self) -> None:
        self._log: Log | None = None
        self._ends: deque[int] = deque(maxlen=KEPT)

    def take(self, scheduler: Any) -> None:  # noqa: ANN401 - SGLang's scheduler
        """Begin with ``scheduler``."""
        self._log = Log(scheduler)

    def end_iteration(self, *_: object) -> None:
        """Note the end of an iteration's handling of requests."""
        self._ends.append(time.monotonic_ns())

    def apply(self, _result: object, _policy: object, update: Any) -> None:  # noqa: ANN401 - kvcached's Update
        """Record an update that was applied."""
        if self._log is not None:
            self._log.write(event="apply", revision=update.revision, at=time.monotonic_ns(), ends=list(self._ends))


def install() -> None:
    """Record in this process."""
    timer = Timer()
    when_placed(timer.take)
    hook_after(f"{SCHEDULER}.process_input_requests", timer.end_iteration)
    hook_after("kvcached.policy.RetentionPolicy.update", timer.apply)
