"""Watches from outside how much memory the KV pools of a running rig hold, as the kernel counts it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rig_process import Engine

INTERVAL_S = 0.2


@dataclass(frozen=True)
class MemorySample:
    """The memory of each rank's pool at one moment, in seconds from ``ready``."""

    at_s: float
    pool_bytes: tuple[int, ...]


class MemorySampler(threading.Thread):
    """Takes a sample now and then until the first rank has ended."""

    def __init__(self, engine: Engine) -> None:
        """Watch the ranks of ``engine``."""
        super().__init__(daemon=True)
        self.samples: list[MemorySample] = []
        self._engine = engine
        self._pids = engine.rank_pids()

    def run(self) -> None:
        """Sample until a rank has ended."""
        try:
            while True:
                at_s = self._engine.now()
                self.samples.append(MemorySample(at_s, tuple(anonymous_bytes_of_pool(pid) for pid in self._pids)))
                time.sleep(INTERVAL_S)
        except OSError:  # a rank has ended
            return


def anonymous_bytes_of_pool(pid: int) -> int:
    """Return what the kernel counts as the anonymous memory of the KV pool: the largest mapping without a name."""
    largest = held = 0
    named = True
    size = 0
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            named = len(values) > 4  # noqa: PLR2004 - permissions, offset, device, inode; then the name
        elif key == "Size:":
            size = int(values[0])
        elif key == "Anonymous:" and not named and size > largest:
            largest, held = size, int(values[0]) * 1024
    if not largest:
        message = f"process {pid} has ended"
        raise OSError(message)
    return held
