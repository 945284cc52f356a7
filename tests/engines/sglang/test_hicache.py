"""The limit bounds the device tier of a hierarchical cache, and holds again right after a transfer completed."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
from sglang_server import prompt, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Say, Serve
    from sglang_server import Answer, Server

pytestmark = pytest.mark.skipif(
    version("sglang") != "0.5.23", reason="the stand-ins for CUDA in HiCache are written for 0.5.23"
)
LENGTH = 400
TRANSFER_S = 0.2
REPORT_PERIOD_S = 0.25
OPTIONS = (
    *("--tp-size", "2", "--enable-hierarchical-cache", "--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first", "--hicache-ratio", "2", "--hicache-write-policy"),
)


def device_tokens(answer: Answer) -> int:
    """Return how many cached tokens of an answer came from the device."""
    return answer.details["device"] if answer.details else answer.cached_tokens


def settle(server: Server) -> None:
    """Wait until nothing is idle and nothing is in use."""

    def settled() -> bool:
        replica = server.status()[0]
        return bool(replica["idle_tokens"] == replica["active_tokens"] == 0)

    time.sleep(2 * REPORT_PERIOD_S)  # until the last request is in the reports
    wait_until(settled, 30, "the device tier is empty")


@pytest.mark.parametrize("policy", [pytest.param("write_through", marks=pytest.mark.long), "write_back"])
def test_the_limit_holds_after_each_transfer(serve: Serve, plain_model: Path, policy: str, say: Say) -> None:
    """Nothing is evicted while a transfer locks it, and all of it within one iteration of the transfer's end."""
    environ = {"KVCACHED_PROBE_TRANSFER_S": str(TRANSFER_S)}
    server = serve(plain_model, *OPTIONS, policy, environ=environ, probes=("record", "transfers"))
    server.apply_limit(0)
    settle(server)
    for seed in (1, 2):
        assert device_tokens(server.generate(prompt(seed, LENGTH))) == 0
        settle(server)
    again = server.generate(prompt(1, LENGTH))
    assert device_tokens(again) == 0
    assert again.cached_tokens > 0, "the host tier is not bounded, and serves it"
    settle(server)
    time.sleep(2 * TRANSFER_S)
    records = server.records()
    first, second = records[0, 0, 0], records[0, 0, 1]
    assert first == second
    limited = first[[record["event"] for record in first].index("apply") :]
    evicted = [record for record in limited if record["event"] == "evict"]
    gained = [record for record in limited if record["event"] == "transferred" and record["gained"] > 0]
    say(f"{policy}: {len(gained)} transfers freed tokens, {len(evicted)} evictions, equal on both ranks")
    assert sum(record["evicted"] for record in evicted) >= 2 * LENGTH
    for record in gained:
        followed = [each["iteration"] - record["iteration"] for each in evicted]
        assert any(0 <= distance <= 1 for distance in followed), record
    assert all(record["idle"] == 0 for record in evicted)
    if policy == "write_through":
        assert gained
