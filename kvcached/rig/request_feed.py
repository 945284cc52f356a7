"""Hands out a workload's requests: by their time stamps, or as fast as the engine takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcached.workload.request import Arrival, Request

IN_FLIGHT = 96
"""How many requests are unfinished at once where no time stamps pace the load."""


class Feed:
    """The arrivals that are still to come. Rank 0 alone holds one, because it reads the clock."""

    def __init__(self, arrivals: Iterable[Arrival], speed: float | None) -> None:
        """Hand out ``arrivals`` ``speed`` times as fast as stamped, or as fast as they are served if None."""
        self._arrivals = iter(arrivals)
        self._speed = speed
        self._next = next(self._arrivals, None)
        self._start = 0.0

    def start(self, now: float) -> None:
        """Let the workload begin at ``now``, a reading of the monotonic clock in seconds."""
        self._start = now

    @property
    def exhausted(self) -> bool:
        """Whether every request was handed out."""
        return self._next is None

    def next_due(self) -> float | None:
        """Return when the next request arrives on the monotonic clock, None if there is none."""
        return None if self._next is None else self._due(self._next)

    def take(self, now: float, unfinished: int) -> list[Request]:
        """Return the requests that have arrived by ``now``, in order, while ``unfinished`` others are in progress."""
        taken: list[Request] = []
        while self._next is not None and self._due(self._next) <= now:
            if self._speed is None and unfinished + len(taken) >= IN_FLIGHT:
                break
            taken.append(self._next.request)
            self._next = next(self._arrivals, None)
        return taken

    def _due(self, arrival: Arrival) -> float:
        return self._start if self._speed is None else self._start + arrival.at_ms / 1000 / self._speed
