"""The command line and toy engines as processes, for tests of what an operator meets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.forked import ENGINE, popen

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.forked import Process

AS_USER = Path(__file__).parent / "as_user.py"
PATIENCE_S = 30.0
"""How long anything may take on a loaded machine before a test fails."""


class Control:
    """Runs ``python -m kvcached.control`` on one ledger directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def command(self, *arguments: str) -> list[str]:
        """Return a command line that names the ledger directory."""
        return [sys.executable, "-m", "kvcached.control", *arguments, "--ledger-dir", str(self.directory)]

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return run(self.command(*arguments), **environment)

    def json(self, *arguments: str) -> Any:  # noqa: ANN401 - JSON is anything
        """Run a command with ``--json``, and return the one object that it printed."""
        return json.loads(self.run(*arguments, "--json").stdout)

    def replica(self, instance: str) -> dict[str, Any]:
        """Return what ``status`` says of the only replica of an instance."""
        (found,) = self.json("status", "--instance", instance)["instances"]
        (replica,) = found["replicas"]
        return dict(replica)


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with more environment, and make sure that nobody sees a traceback."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = popen(
        command,
        environment={**inherited, "PYTHONWARNINGS": "error", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in errors, errors
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


class Toys:
    """Starts toy engines on one ledger directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[Process] = []

    def start(self, *instances: str, **options: str | int) -> Process:
        """Start one process with these instances, and wait until all of them are registered."""
        process = self.launch(*instances, **options)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == f"ready {self.directory}\n", line
        return process

    def launch(self, *instances: str, **options: str | int) -> Process:
        """Start one process with these instances, and return at once."""
        command = [sys.executable, str(ENGINE), "--ledger-dir", str(self.directory)]
        for instance in instances:
            command += ["--instance", instance]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        with (self.directory.parent / f"engine-{len(self.started)}.log").open("w") as log:
            process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        self.started.append(process)
        return process

    def stop(self) -> None:
        """End what is still running."""
        for process in self.started:
            process.kill()
            process.communicate()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition`` holds; fail, naming ``what``, if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S} s"
        time.sleep(0.02)
