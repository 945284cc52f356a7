"""The rate of arrivals: it follows a change within seconds, and steady traffic is not taken for a change."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvcached.balance.rules import Rules
from kvcached.balance.traffic import Reading, TrafficMeter

if TYPE_CHECKING:
    from collections.abc import Iterable

TOKENS = 1000


class Arrivals:
    """Poisson arrivals of prompts of 1,000 tokens, read once a second."""

    def __init__(self, seed: int) -> None:
        print(f"seed {seed}")
        self._random = random.Random(seed)
        self._requests = 0
        self.now_s = 0.0
        self.meter = TrafficMeter(Rules())
        self.meter.note(Reading(0.0, 0, 0))

    def run(self, seconds: int, per_s: float) -> Iterable[float]:
        """Let requests arrive, and yield the meter's requests per second after each second."""
        for _ in range(seconds):
            end_s = self.now_s + 1.0
            at_s = self.now_s + (self._random.expovariate(per_s) if per_s else 2.0)
            while at_s < end_s:
                self._requests += 1
                at_s += self._random.expovariate(per_s)
            self.now_s = end_s
            self.meter.note(Reading(end_s, self._requests, self._requests * TOKENS))
            yield self.meter.tokens_per_s / TOKENS


@pytest.mark.parametrize("seed", range(4))
def test_fall_and_rise_are_followed_within_a_minute(seed: int) -> None:
    """From 6 to 0.3 requests a second and back, the rate is near the truth after 60 seconds: in it are few requests."""
    arrivals = Arrivals(seed)
    for per_s in (6.0, 0.3, 6.0):
        *_, found = arrivals.run(300, per_s)
        assert found == pytest.approx(per_s, rel=0.4)
        *_, found = arrivals.run(60, 6.3 - per_s)
        assert found == pytest.approx(6.3 - per_s, rel=0.7)
        *_, found = arrivals.run(120, per_s)


@pytest.mark.parametrize("seed", range(4))
def test_steady_traffic_keeps_its_past(seed: int) -> None:
    """Within 20 minutes of steady traffic the mean stays close to the truth: it is over minutes and not seconds."""
    arrivals = Arrivals(seed + 100)
    found = list(arrivals.run(1200, 3.0))[300:]
    assert max(found) < 3.0 * 1.35
    assert min(found) > 3.0 / 1.35


def test_silence_is_a_change_and_is_counted() -> None:
    """Where nothing arrives any more the rate falls to almost nothing within half a minute, and silence is told."""
    arrivals = Arrivals(7)
    list(arrivals.run(300, 5.0))
    *_, found = arrivals.run(30, 0.0)
    assert found < 0.25
    assert arrivals.meter.silent_s(arrivals.now_s) >= 29.0
    assert arrivals.meter.known_s(arrivals.now_s) == 330.0


def test_nothing_is_known_at_the_first_reading() -> None:
    """One reading is no rate: counters may have grown for days."""
    meter = TrafficMeter(Rules())
    assert meter.tokens_per_s == 0.0
    meter.note(Reading(100.0, 10**6, 10**9))
    assert meter.tokens_per_s == 0.0
