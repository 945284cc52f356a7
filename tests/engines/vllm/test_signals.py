"""The signal handlers of an engine core: those that vLLM gives it, and none of ours, whatever happens to the ledger."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_serving import Server, engine_environment, replicas, serving, wait_until

from kvcached.control import set_prefix_cache_retention_limit


def handled_signals(server: Server) -> list[str]:
    """Return which signals the server's processes have handlers for, engine core first."""
    return [
        next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
        for pid in server.core_pids()
    ]


def test_engine_core_handles_the_signals_of_one_without_the_plugin(model: Path, tmp_path: Path) -> None:
    """Before and after publications and a lost ledger, an engine core handles what it handles with the plugin off."""
    off = engine_environment(tmp_path / "off", "off", KVCACHED_DISABLE="1")
    with serving(model, tmp_path, off) as server:
        expected = handled_signals(server)
        assert len(expected) == 1
    ledger_dir = tmp_path / "ledger"
    with serving(model, tmp_path, engine_environment(ledger_dir, "on")) as server:
        wait_until(lambda: replicas("on", ledger_dir), 60)
        assert handled_signals(server) == expected
        server.set(1000)
        assert handled_signals(server) == expected
        os.truncate(ledger_dir / "cpu-0.ledger", 0)
        again = lambda: set_prefix_cache_retention_limit(0, instance_name="on", ledger_dir=ledger_dir, wait=5)  # noqa: E731
        wait_until(lambda: again().applied, 60)
        assert (ledger_dir / "cpu-0.ledger.damaged").exists()
        assert handled_signals(server) == expected
