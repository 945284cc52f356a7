"""The signal handlers of a scheduler: those that SGLang gives it, and none of ours, whatever happens to the ledger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_server import wait_until

if TYPE_CHECKING:
    from conftest import Serve
    from sglang_server import Server


def handled_signals(server: Server) -> list[str]:
    """Return which signals the schedulers of a server have handlers for."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            title = (entry / "cmdline").read_bytes().decode(errors="replace")
            session = os.getsid(int(entry.name)) if entry.name.isdigit() else 0
            lines = (entry / "status").read_text().splitlines() if title.startswith("sglang::scheduler") else []
        except OSError:
            continue
        if lines and session == server.pid:
            found.append(next(line for line in lines if line.startswith("SigCgt")))
    return found


def test_scheduler_handles_the_signals_of_one_without_the_plugin(serve: Serve, plain_model: Path) -> None:
    """Before and after publications and a lost ledger, a scheduler handles what it handles with the plugin off."""
    stock = serve(plain_model, environ={"KVCACHED_DISABLE": "1"})
    expected = handled_signals(stock)
    stock.stop()
    assert len(expected) == 1
    server = serve(plain_model)
    assert handled_signals(server) == expected
    server.apply_limit(1000)
    assert handled_signals(server) == expected
    os.truncate(server.ledger_dir / "cpu-0.ledger", 0)
    wait_until(lambda: server.publish(0, wait=5).applied, 60, "control came back")
    assert (server.ledger_dir / "cpu-0.ledger.damaged").exists()
    assert handled_signals(server) == expected
