"""Real engines for the tests: processes of their own, in a ledger directory of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.forked import popen

from kvcached.control import get_instances, set_kv_capacity_limit, set_prefix_cache_retention_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.forked import Process

    from kvcached.control import InstanceStatus
    from kvcached.ledger.publication import PublicationResult

START_S = 60.0
"""How long an engine may take to load torch and form its group on a loaded machine."""


class Engine:
    """A running rig, from its ``ready`` line on."""

    def __init__(self, process: Process, directory: Path, instance: str) -> None:
        self.process = process
        self.directory = directory
        self.instance = instance

    def publish(self, limit: int, wait: float | None = 30.0) -> PublicationResult:
        """Publish ``limit`` from this process, and wait until it is applied unless told otherwise."""
        return set_prefix_cache_retention_limit(
            limit,
            instance_name=self.instance,
            ledger_dir=self.directory / "ledger",
            wait=wait,
        )

    def cap(self, tokens: int, wait: float | None = 30.0) -> PublicationResult:
        """Publish a cap of ``tokens``, and wait until the memory beyond it is back unless told otherwise."""
        return set_kv_capacity_limit(
            tokens,
            instance_name=self.instance,
            ledger_dir=self.directory / "ledger",
            wait=wait,
        )

    def statuses(self) -> tuple[InstanceStatus, ...]:
        """Return what all engines in the ledger directory report of themselves."""
        return get_instances(self.directory / "ledger")

    def status(self) -> InstanceStatus:
        """Return what the engine reports of itself."""
        (status,) = self.statuses()
        return status

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until ``condition`` holds; fail, naming ``what``, if it never does."""
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, f"the engine ended before {what}"
            assert time.monotonic() < deadline, f"no {what} within {START_S} s"
            time.sleep(0.02)

    def rank_pids(self) -> list[int]:
        """Return the process ids of the ranks, in order."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def finish(self, *, interrupt: bool = False) -> dict[str, Any]:
        """Wait for the end (asking for it with ``interrupt``), and return the report."""
        if interrupt:
            self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=START_S)
        assert self.process.returncode == 0, errors
        report: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return report


class Engines:
    """Starts engines; a test has its own ledger directory under ``tmp_path``."""

    def __init__(self, directory: Path, starter: list[str] | None = None) -> None:
        """Start engines in ``directory``, each by the command ``starter`` if one is given."""
        (directory / "ledger").mkdir(mode=0o700, parents=True)
        self.directory = directory
        self.starter = starter or []
        self.started: list[Process] = []

    def within(self, name: str, starter: list[str]) -> Engines:
        """Return what starts engines in a folder of this one, each by the command ``starter``; stop it as well."""
        return Engines(self.directory / name, starter)

    def launch(self, *arguments: str, instance: str = "rig", **environment: str) -> Process:
        """Start ``python -m kvcached.rig`` and return at once."""
        command = [*self.starter, sys.executable, "-m", "kvcached.rig", "--instance", instance, "--check", *arguments]
        command += ["--ledger-dir", str(self.directory / "ledger"), "--report", str(self.directory / "report.json")]
        process = popen(
            command,
            environment={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def start(self, *arguments: str, instance: str = "rig", **environment: str) -> Engine:
        """Start an engine and wait for its ``ready`` line."""
        process = self.launch(*arguments, instance=instance, **environment)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == f"ready {instance} {self.directory / 'ledger'}\n", line
        return Engine(process, self.directory, instance)

    def stop(self) -> None:
        """End what is still running."""
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Return what starts engines in ``tmp_path``."""
    engines = Engines(tmp_path)
    yield engines
    engines.stop()
