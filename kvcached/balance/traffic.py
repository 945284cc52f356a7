"""How much prompt work arrives at one instance: the mean rate since it last changed.

A moving average is either late or noisy. Counts are compared instead, before and after each moment, as those of a
process whose rate may change: what was before a change is forgotten at once, and without a change all counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached.balance.rules import Rules


@dataclass(frozen=True)
class Reading:
    """An engine's counters at one moment: a monotonic time in seconds, its requests and their prompt tokens so far."""

    time_s: float
    requests: int
    tokens: int


class TrafficMeter:
    """The traffic of one incarnation of an instance. For one thread."""

    def __init__(self, rules: Rules) -> None:
        """Begin without knowing anything."""
        self._rules = rules
        self._readings: list[Reading] = []
        self._began_s = 0.0
        self._heard_s = 0.0

    def note(self, reading: Reading) -> None:
        """Take what the counters say now. Also where nothing arrived: silence counts."""
        if not self._readings:
            self._began_s = self._heard_s = reading.time_s
        elif reading.requests > self._readings[-1].requests:
            self._heard_s = reading.time_s
        self._readings.append(reading)
        oldest = reading.time_s - self._rules.memory_s
        while len(self._readings) > 1 and self._readings[1].time_s <= oldest:
            del self._readings[0]
        self._forget_what_was_before_a_change()

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second since the last change of rate; 0 before the second reading."""
        if not self._readings:
            return 0.0
        first, last = self._readings[0], self._readings[-1]
        span = last.time_s - first.time_s
        return (last.tokens - first.tokens) / span if span > 0 else 0.0

    def silent_s(self, now_s: float) -> float:
        """Return for how many seconds no request arrived, since the first reading at most."""
        return now_s - self._heard_s

    def known_s(self, now_s: float) -> float:
        """Return for how many seconds this instance has been watched."""
        return now_s - self._began_s if self._readings else 0.0

    def _forget_what_was_before_a_change(self) -> None:
        place = self._recent()
        if place is None:
            return
        came, expected = _came_and_expected(self._readings, place)
        factor = self._rules.change_factor
        if max(came, expected) >= self._rules.judged_requests and not expected / factor <= came <= expected * factor:
            del self._readings[: self._likeliest_change()]

    def _recent(self) -> int | None:
        """Return where the last requests begin, as many as are compared, come or expected; None without a before."""
        readings, rules = self._readings, self._rules
        found = None
        for place in range(len(readings) - 2, 0, -1):
            if readings[-1].time_s - readings[place].time_s > rules.recent_s:
                break
            if not self._can_judge(place):
                continue
            found = place
            if max(_came_and_expected(readings, place)) >= rules.recent_requests:
                break
        return found

    def _can_judge(self, place: int) -> bool:
        """Return whether enough came before ``place``, or would have at the rate after it, to tell the two apart."""
        first, middle, last = self._readings[0], self._readings[place], self._readings[-1]
        before = middle.requests - first.requests
        after = (last.requests - middle.requests) / (last.time_s - middle.time_s)
        return max(before, after * (middle.time_s - first.time_s)) >= self._rules.judged_requests

    def _likeliest_change(self) -> int:
        """Return the moment before and after which two constant rates explain the counts best."""
        readings, least = self._readings, self._rules.judged_requests
        places = [place for place in range(1, len(readings) - 1) if max(_came_and_expected(readings, place)) >= least]
        return max(places, key=lambda place: _likelihood(readings, place))


def _came_and_expected(readings: list[Reading], place: int) -> tuple[float, float]:
    """Return how many requests came since a reading, and how many would have at the rate before it."""
    first, middle, last = readings[0], readings[place], readings[-1]
    before = (middle.requests - first.requests) / (middle.time_s - first.time_s)
    return last.requests - middle.requests, before * (last.time_s - middle.time_s)


def _likelihood(readings: list[Reading], place: int) -> float:
    """Return the logarithm of the likelihood of two Poisson rates, apart from what does not depend on the place."""
    total = 0.0
    for one, other in ((readings[0], readings[place]), (readings[place], readings[-1])):
        count = other.requests - one.requests
        if count > 0:
            total += count * math.log(count / (other.time_s - one.time_s))
    return total
