"""Agents, engines and stores as real processes, for tests of a fleet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.commands import Toys
from support.needs import need_module, need_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.etcd_cluster import EtcdCluster


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


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Return what starts agents."""
    agents = Agents(tmp_path)
    yield agents
    agents.stop()


@pytest.fixture
def toys(ledger_dir: Path) -> Iterator[Toys]:
    """Return what starts toy engines in ``ledger_dir``."""
    toys = Toys(ledger_dir)
    yield toys
    toys.stop()


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


@pytest.fixture
def rigs(ledger_dir: Path) -> Iterator[Rigs]:
    """Return what starts embedded engines in ``ledger_dir``."""
    rigs = Rigs(ledger_dir)
    yield rigs
    rigs.stop()


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


@pytest.fixture
def desired(tmp_path: Path) -> DesiredFile:
    """Return a file of documents that does not exist yet."""
    return DesiredFile(tmp_path)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Return a running etcd of one member."""
    yield from running_etcd(tmp_path, 1)


@pytest.fixture
def etcd_of_three(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Return a running etcd of three members."""
    yield from running_etcd(tmp_path, 3)


def running_etcd(directory: Path, members: int) -> Iterator[EtcdCluster]:
    need_program("etcd", "etcd-server")
    need_module("grpc")
    from support.etcd_cluster import EtcdCluster  # noqa: PLC0415 - imports grpc, which a machine may lack

    cluster = EtcdCluster(directory, members)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
