"""Agents, engines, nodes and the command line of a fleet as real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from kvcached.control import get_instances
from support.commands import Toys, run

if TYPE_CHECKING:
    from pathlib import Path


class Agents:
    """Starts ``kvcached-agent`` on ledger directories, and ends what is left at the end of a test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, fleet: str, ledger_dir: Path, *options: str, node: str = "n1") -> subprocess.Popen[bytes]:
        """Start an agent, and return at once."""
        command = [sys.executable, "-m", "kvcached.fleet", "--fleet", fleet, "--node", node, *options]
        with (self.directory / f"agent-{node}.log").open("ab") as log:
            process = subprocess.Popen([*command, "--ledger-dir", str(ledger_dir)], stderr=log)
        self.started.append(process)
        return process

    def log(self, node: str = "n1") -> str:
        """Return what the agents of a node said so far."""
        return (self.directory / f"agent-{node}.log").read_text()

    def stop(self) -> None:
        """End what is still running."""
        for process in self.started:
            process.kill()
            process.wait()
            assert "Traceback" not in "".join(path.read_text() for path in self.directory.glob("agent-*.log"))


class Rigs:
    """Starts real embedded engines in one ledger directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[str]] = []

    def start(self, instance: str = "chat") -> subprocess.Popen[str]:
        """Start a one-rank engine that idles, and wait for its line ``ready``."""
        command = [sys.executable, "-m", "kvcached.rig", "--instance", instance, "--requests", "1", "--linger", "600"]
        process = subprocess.Popen(
            [*command, "--ledger-dir", str(self.directory)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == f"ready {instance} {self.directory}\n"
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill an engine and its ranks."""
        os.killpg(process.pid, 9)
        process.communicate()

    def stop(self) -> None:
        """End what is still running."""
        for process in self.started:
            if process.poll() is None:
                self.kill(process)


class DesiredFile:
    """A file of documents that is replaced whole, and the status file of the agent that follows it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "desired.json"
        self.status_path = directory / "status.json"

    @property
    def fleet(self) -> str:
        """The file as a fleet's URL."""
        return f"file:{self.path}"

    def write(self, **documents: dict[str, Any]) -> None:
        """Replace the file by one with these documents."""
        self.write_text(json.dumps({"instances": documents}))

    def write_text(self, text: str) -> None:
        """Replace the file by one with this text."""
        temporary = self.path.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.path)

    def status(self, instance: str) -> dict[str, Any]:
        """Return what the agent says of an instance; an empty object before it said anything."""
        if not self.status_path.exists():
            return {}
        return dict(json.loads(self.status_path.read_text())["targets"].get(instance, {}))

    def state(self, instance: str) -> str:
        """Return the state of an instance."""
        return str(self.status(instance).get("state", ""))


class Nodes:
    """Nodes of a fleet on this machine: a ledger directory, toy engines and an agent each."""

    def __init__(self, directory: Path, agents: Agents) -> None:
        self.directory = directory
        self.agents = agents
        self.toys: dict[str, Toys] = {}

    def start(self, fleet: str, *names: str, options: tuple[str, ...] = (), **engine: str | int) -> None:
        """Start an agent and an engine ``chat`` on each of these nodes."""
        for name in names:
            ledgers = self.directory / name / "ledgers"
            ledgers.mkdir(mode=0o700, parents=True)
            self.toys[name] = Toys(ledgers)
            self.toys[name].start("chat", **engine)
            self.agents.start(fleet, ledgers, *options, node=name)

    def limit(self, name: str) -> int:
        """Return the limit that is stored for the engine of a node; -2 while it is away."""
        found = get_instances(self.directory / name / "ledgers")
        return found[0].replicas[0].members[0].limit_tokens if found else -2

    def revision(self, name: str) -> int:
        """Return the revision that is stored for the engine of a node."""
        return get_instances(self.directory / name / "ledgers")[0].replicas[0].members[0].revision

    def limits(self) -> list[int]:
        """Return those of all nodes."""
        return [self.limit(name) for name in self.toys]

    def stop(self) -> None:
        """End the engines."""
        for toys in self.toys.values():
            toys.stop()


class FleetControl:
    """The command line on a fleet."""

    def __init__(self, fleet: str) -> None:
        self.fleet = fleet

    def command(self, *arguments: str) -> list[str]:
        """Return a command line on the fleet."""
        return [sys.executable, "-m", "kvcached.control", *arguments, "--fleet", self.fleet]

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run a command; its exit code, and all that it said."""
        result = run(self.command(*arguments))
        print(result.stdout, result.stderr)
        return result.returncode, result.stdout + result.stderr

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run a command with ``--json``, and return the object."""
        return dict(json.loads(run(self.command(*arguments, "--json")).stdout))

    def agents(self) -> int:
        """Return how many agents are alive."""
        return len(self.json("status")["agents"])
