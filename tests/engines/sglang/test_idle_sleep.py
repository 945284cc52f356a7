"""A scheduler that sleeps while idle is woken by a publication."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from sglang_server import INSTANCE, Server

from kvcached.control import get_instances, set_prefix_cache_retention_limit

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Say, Serve


def latencies_ms(server: Server, count: int) -> list[float]:
    """Return how long publications to the idle server took until it reported them applied."""
    found = []
    for index in range(count):
        time.sleep(0.2 + 0.037 * (index % 10))  # at any place of the one-second sleep
        began = time.monotonic()
        result = set_prefix_cache_retention_limit(index, instance_name=INSTANCE, ledger_dir=server.ledger_dir, wait=10)
        assert result.accepted
        found.append((time.monotonic() - began) * 1000)
        replica = get_instances(server.ledger_dir)[0].replicas[0]
        assert (replica.applied.limit_tokens, replica.applied.revision) == (index, result.revision)
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
