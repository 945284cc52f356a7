"""Hands out a workload's requests: by their time stamps, or as fast as the engine takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.rig.request import Arrival, Request

IN_FLIGHT = 96
"""How many requests are unfinished at once where no time stamps pace the load."""


class Feed:
    """The arrivals that are still to come. Rank 0 alone holds one, because it reads the clock."""

    def __init__(self, arrivals: Sequence[Arrival], speed: float | None) -> None:
        """Hand out ``arrivals`` ``speed`` times as fast as stamped, or as fast as they are worked off if None."""
        self._arrivals = arrivals
        self._speed = speed
        self._next = 0
        self._start = 0.0

    def start(self, now: float) -> None:
        """Let the workload begin at ``now``, a reading of the monotonic clock in seconds."""
        self._start = now

    @property
    def exhausted(self) -> bool:
        """Whether every request was handed out."""
        return self._next >= len(self._arrivals)

    def next_due(self) -> float | None:
        """Return when the next request arrives on the monotonic clock, None if there is none."""
        if self.exhausted:
            return None
        if self._speed is None:
            return self._start
        return self._start + self._arrivals[self._next].at_ms / 1000 / self._speed

    def take(self, now: float, unfinished: int) -> list[Request]:
        """Return the requests that have arrived by ``now``, in order, while ``unfinished`` others are in work."""
        taken: list[Request] = []
        while (due := self.next_due()) is not None and due <= now:
            if self._speed is None and unfinished + len(taken) >= IN_FLIGHT:
                break
            taken.append(self._arrivals[self._next].request)
            self._next += 1
        return taken
