"""A scheduler that sleeps while idle is woken by a publication."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

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


def test_the_doorbell_ends_the_sleep(serve: Serve, plain_model: Path, say: Say) -> None:
    """With ``--sleep-on-idle`` a limit is applied within 20 ms at the median."""
    server = serve(plain_model, "--tp-size", "2", "--sleep-on-idle")
    found = latencies_ms(server, 20)
    say(f"publication to applied: median {statistics.median(found):.1f} ms, longest {max(found):.1f} ms")
    assert statistics.median(found) <= 20


def test_without_the_doorbell_the_sleep_is_slept_out(serve: Serve, plain_model: Path, say: Say) -> None:
    """The same without the doorbell takes hundreds of milliseconds: the test above can fail."""
    server = serve(plain_model, "--tp-size", "2", "--sleep-on-idle", probes=("mute",))
    found = latencies_ms(server, 6)
    say(f"without the doorbell: median {statistics.median(found):.1f} ms")
    assert statistics.median(found) > 100
