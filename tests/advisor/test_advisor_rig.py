"""The advisor in the embedded engine: real processes, asked by the real command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from support.commands import wait_for
from support.forked import popen

from kvcached.control.queries.recommendation import Goal, advise_instance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.commands import Control

REQUESTS = 150


@contextlib.contextmanager
def rig(directory: Path, *arguments: str, **environment: str) -> Iterator[None]:
    """Run an engine until the block ends."""
    command = [sys.executable, "-m", "kvcached.rig", "--instance", "rig", "--ledger-dir", str(directory), *arguments]
    process = popen(command, environment={**os.environ, **environment}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("ready rig ")
        yield
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def counted_requests(ledger_dir: Path) -> int:
    """Return how many requests the advisor of the rig has seen end."""
    return advise_instance("rig", str(ledger_dir), Goal(share=0.9))[0].requests


def test_every_request_of_a_run_is_counted_by_one_rank(ledger_dir: Path, control: Control) -> None:
    """After a run on two ranks there is one page, which has counted each request, and a curve that fits the engine."""
    # Paced: of many equal prompts that begin at once, none can hit another, which the model does not know.
    arguments = ("--tp", "2", "--requests", str(REQUESTS), "--seed", "5", "--speed", "3", "--linger", "3600")
    with rig(ledger_dir, *arguments):
        wait_for(lambda: counted_requests(ledger_dir) == REQUESTS, "a full count")
        (replica,) = control.json("advise", "--target", "0.5")["replicas"]
        assert len(list(ledger_dir.glob("*.advice"))) == 1
        assert abs(replica["model_error"]) < 0.03
        assert replica["capacity_tokens"] == 262_144
    assert list(ledger_dir.glob("*.advice")) == []


def test_arrivals_at_the_same_moment_are_named_as_the_cause(ledger_dir: Path, control: Control, tmp_path: Path) -> None:
    """Where equal prompts arrive all at once, and hit nothing, the refusal of advice names that as the cause."""
    line = {"input_length": 4096, "output_length": 16}
    lines = [
        json.dumps({**line, "timestamp": number * 1000, "hash_ids": [number // 20 * 8 + block for block in range(8)]})
        for number in range(200)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    with rig(ledger_dir, "--trace", str(trace), "--linger", "3600"):
        wait_for(lambda: counted_requests(ledger_dir) == len(lines), "a full count")
        result = control.run("advise")
    assert result.returncode == 1
    assert "the likely cause is equal prompts that arrive at the same moment" in result.stderr
    assert "--speed" in result.stderr


def test_switched_off_advisor_leaves_no_page(ledger_dir: Path, control: Control) -> None:
    """With ``KVCACHED_ADVISOR=0`` the engine serves as before, and ``advise`` says what is missing."""
    arguments = ("--requests", "20", "--linger", "3600")
    with rig(ledger_dir, *arguments, KVCACHED_ADVISOR="0"):
        wait_for(lambda: control.replica("rig")["active_tokens"] == 0, "an idle engine")
        result = control.run("advise")
        assert result.returncode == 1
        assert "KVCACHED_ADVISOR=0" in result.stderr
        assert list(ledger_dir.glob("*.advice")) == []
