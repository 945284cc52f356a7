"""Watches from outside how much memory the ranks of a running rig hold, as the kernel counts it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.memory.kernel_figures import anonymous_bytes

if TYPE_CHECKING:
    from rig_process import Engine

INTERVAL_S = 0.15


@dataclass(frozen=True)
class MemorySample:
    """The anonymous memory of each rank at one moment, in seconds from ``ready``."""

    at_s: float
    anonymous_bytes: tuple[int, ...]


class MemorySampler(threading.Thread):
    """Takes a sample now and then until the first rank has ended."""

    def __init__(self, engine: Engine) -> None:
        """Watch the ranks of ``engine``."""
        super().__init__(daemon=True)
        self.samples: list[MemorySample] = []
        self._engine = engine
        self._pids = engine.rank_pids()

    def run(self) -> None:
        """Sample until there is nobody to be sampled."""
        try:
            while True:
                at_s = self._engine.now()
                self.samples.append(MemorySample(at_s, tuple(anonymous_bytes(pid) for pid in self._pids)))
                time.sleep(INTERVAL_S)
        except OSError:  # a rank has ended
            return
