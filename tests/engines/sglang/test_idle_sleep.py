"""A scheduler that sleeps while idle is woken by a publication."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Say, Serve
    from sglang_server import Server


def latencies_ms(server: Server, count: int) -> list[float]:
    """Return how long publications to the idle server took until it reported them applied."""
    found = []
    for index in range(count):
        time.sleep(0.2 + 0.037 * (index % 10))  # at any place of the one-second sleep
        began = time.monotonic()
        server.apply_limit(index)
        found.append((time.monotonic() - began) * 1000)
    return found


@pytest.mark.long  # two pairs of ranks for one ratio, which `scripts/bench-sglang` measures as well
def test_the_doorbell_ends_the_sleep(serve: Serve, plain_model: Path, say: Say) -> None:
    """With ``--sleep-on-idle`` a limit is applied in a fraction of what it takes where the doorbell is mute."""
    server = serve(plain_model, "--tp-size", "2", "--sleep-on-idle")
    heard = statistics.median(latencies_ms(server, 20))
    server.stop()
    server = serve(plain_model, "--tp-size", "2", "--sleep-on-idle", probes=("mute",))
    slept_out = statistics.median(latencies_ms(server, 6))
    say(f"publication to applied: median {heard:.1f} ms, without the doorbell {slept_out:.1f} ms")
    assert 3 * heard < slept_out
