"""What all processes of a storm know: the instance, and the counters and violations that they write."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from kvcached.values import UNLIMITED, Bound, Identity

GPUS = tuple(f"cpu-{index}" for index in range(8))
RANKS = 3
STARTUP_LIMIT = 16000
BLOCK_TOKENS = 16
VICTIMS_AT_ONCE = 4
WATCHERS = 3
LANES = WATCHERS + VICTIMS_AT_ONCE
COUNTERS = ("publications", "accepted", "applied", "splits", "healed", "looks")

LIMITS = (UNLIMITED, 0, 1, 100, 5_000, 50_000, 2**31 - 1)
CAPS = (2, 200, 6_000, 60_000, 2**31 - 2)
NUMBERS = {Bound.LIMIT: LIMITS, Bound.CAP: CAPS}
"""What is published of each bound: nothing that is published of the other."""


class Shared:
    """Counters and violations that all processes of a storm write. Each process counts in a lane of its own."""

    def __init__(self, directory: str) -> None:
        self._memory = mmap.mmap(-1, 8 * len(COUNTERS) * LANES)
        self._violations = os.open(f"{directory}/violations", os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600)
        self._path = f"{directory}/violations"
        self.lane = 0

    def add(self, name: str, count: int = 1) -> None:
        """Count something."""
        at = 8 * (self.lane * len(COUNTERS) + COUNTERS.index(name))
        struct.pack_into("<Q", self._memory, at, struct.unpack_from("<Q", self._memory, at)[0] + count)

    def get(self, name: str) -> int:
        """Return a count."""
        lanes = struct.unpack_from(f"<{len(COUNTERS) * LANES}Q", self._memory)
        return sum(lanes[COUNTERS.index(name) :: len(COUNTERS)])

    def violate(self, text: str) -> None:
        """Write a violation down."""
        os.write(self._violations, f"{text}\n".encode())

    def violations(self) -> list[str]:
        """Return what was written down."""
        return Path(self._path).read_text(encoding="utf-8").splitlines()


def identity(name: str) -> Identity:
    """Return who an engine of the storm is."""
    return Identity(name, "storm", "1", 0, RANKS, 1, STARTUP_LIMIT, BLOCK_TOKENS)
