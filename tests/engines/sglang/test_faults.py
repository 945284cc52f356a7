"""What a failing eviction does, and what it does not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang_server import prompt, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Say, Serve
    from sglang_server import Server


def calls(server: Server) -> list[int]:
    """Return how often each rank's eviction was called."""
    return [len(records) for records in server.records().values()]


def test_a_failing_eviction_leaves_limit_and_server_standing(serve: Serve, plain_model: Path, say: Say) -> None:
    """The limit stays, the outcome says so, nothing spins, the server answers, and the next release tries again."""
    server = serve(plain_model, "--tp-size", "2", probes=("faults",))
    server.generate(prompt(1, 400))
    fault = server.records_dir / "fault"
    fault.touch()
    assert server.set_limit(0, "--wait", "2").code == 6
    replica = server.status()[0]
    assert (replica["outcome"], replica["applied"]["limit_tokens"]) == ("eviction_failed", 0)
    assert replica["eviction_errors"] == 1
    assert replica["idle_tokens"] >= 400
    before = calls(server)
    time.sleep(2)
    say(f"eviction calls per rank: {before}, after 2 s idle {calls(server)}")
    assert calls(server) == before == [1, 1]
    assert server.generate(prompt(1, 400)).cached_tokens == 399
    wait_until(lambda: calls(server) == [2, 2], 30, "each rank tries again at the release")
    assert server.log().count("InjectedError: injected by a test") == 2, "said once on each rank"
    fault.unlink()
    server.generate(prompt(2, 100))
    wait_until(lambda: server.status()[0]["outcome"] == "applied", 30, "the next release evicts")
    replica = server.status()[0]
    assert (replica["idle_tokens"], replica["applied"]["limit_tokens"]) == (0, 0)
    assert server.generate(prompt(1, 400)).cached_tokens == 0
