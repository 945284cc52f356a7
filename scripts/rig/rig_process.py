"""A rig in a process of its own and the command line that controls it, for the scripts in this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcached.control import get_instances

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "mooncake_conversation_trace.jsonl"
"""A published trace that may lie beside the checkout; without it the rig generates a load."""


@dataclass(frozen=True)
class Publication:
    """One ``set`` or ``cap``: what was asked for, when it was started (seconds from ``ready``), and how it ended."""

    command: str
    limit: str
    at_s: float
    code: int
    output: str


class Engine:
    """A running rig; use it in a ``with`` statement. Its ledger directory is its own and is removed afterwards."""

    def __init__(self, *arguments: str, instance: str, environment: dict[str, str] | None = None) -> None:
        """Start ``python -m kvcached.rig`` with ``arguments`` and wait until it takes publications."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvcached-")
        self._instance = instance
        self.folder = Path(self._folder.name)
        self.command = [sys.executable, "-m", "kvcached.rig", *arguments, "--instance", instance]
        self.command += ["--ledger-dir", str(self.folder / "ledger"), "--report", str(self.folder / "report.json")]
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            text=True,
        )
        if self.process.stdout is None or not self.process.stdout.readline().startswith("ready "):
            self.process.wait()
            message = f"the engine did not start (exit code {self.process.returncode})"
            raise SystemExit(message)
        self.ready_at = time.monotonic()

    def __enter__(self) -> Engine:  # noqa: PYI034 - typing.Self came with Python 3.11
        """Return the engine."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the engine if it still runs, and remove its folder."""
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()

    def now(self) -> float:
        """Return the seconds since the engine was ready."""
        return time.monotonic() - self.ready_at

    def sleep_until(self, moment: float) -> None:
        """Sleep until ``moment`` seconds after the engine was ready."""
        time.sleep(max(0.0, moment - self.now()))

    def control(self, *arguments: str) -> list[str]:
        """Return the command line of a ``kvcached.control`` command for this engine."""
        command, *rest = arguments
        place = ["--instance", self._instance, "--ledger-dir", str(self.folder / "ledger")]
        return [sys.executable, "-m", "kvcached.control", command, *rest, *place]

    def publish(self, limit: str, *options: str, command: str = "set") -> Publication:
        """Publish ``limit`` with the command line, in a process of its own, and wait for the command to end."""
        at_s = self.now()
        result = subprocess.run(
            self.control(command, limit, *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return Publication(command, limit, at_s, result.returncode, result.stdout.strip())

    def rank_pids(self) -> list[int]:
        """Return the process ids of the ranks, in order."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def active_tokens(self) -> int:
        """Return how many tokens requests hold, as the engine last reported it."""
        instances = get_instances(self.folder / "ledger")
        return sum(replica.active_tokens for instance in instances for replica in instance.replicas)

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the engine and return its report."""
        code = self.process.wait()
        if code != 0:
            message = f"the engine ended with exit code {code}"
            raise SystemExit(message)
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        return report


def find_differences(report: dict[str, Any]) -> list[str]:
    """Return one sentence for each way in which the ranks of a report differ or exceed their limits."""
    found = []
    first = report["ranks"][0]
    keys = ("step", "revision", "limit_tokens", "evicted_tokens", "idle_tokens_after")
    cap_keys = ("step", "revision", "cap_tokens", "withheld_tokens_after")
    for rank in report["ranks"]:
        name = f"rank {rank['rank']}"
        if rank["digest"] != first["digest"]:
            found.append(f"{name}: cache content differs from rank 0's at some step")
        if _columns(rank["updates"], keys) != _columns(first["updates"], keys):
            found.append(f"{name}: updates differ from rank 0's")
        if _columns(rank["caps"], cap_keys) != _columns(first["caps"], cap_keys):
            found.append(f"{name}: caps differ from rank 0's")
        if rank["limit_breaches"]:
            found.append(f"{name}: idle tokens exceeded the limit after {rank['limit_breaches']} enforcements")
        found += [f"{name}: {text}" for text in _find_excesses(rank["updates"], report["block_tokens"])]
    return found


def _columns(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in keys) for row in rows]


def _find_excesses(updates: Sequence[dict[str, Any]], block_tokens: int) -> list[str]:
    """Return a sentence for each update that was worked off and left more than its limit (at least one block)."""
    return [
        f"r{one['revision']} left {one['idle_tokens_after']} idle tokens under the limit {one['limit_tokens']}"
        for one in updates
        if one["complete"]
        and one["limit_tokens"] >= 0
        and one["idle_tokens_after"] > (max(one["limit_tokens"], block_tokens) if one["limit_tokens"] else 0)
    ]
