"""Agents, engines and stores as real processes, for tests of a fleet; each test has its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.fleet import Agents, DesiredFile, FleetControl, Nodes, Rigs
from support.needs import need_module, need_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.etcd_cluster import EtcdCluster


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Return what starts agents."""
    agents = Agents(tmp_path)
    yield agents
    agents.stop()


@pytest.fixture
def rigs(ledger_dir: Path) -> Iterator[Rigs]:
    """Return what starts embedded engines in ``ledger_dir``."""
    rigs = Rigs(ledger_dir)
    yield rigs
    rigs.stop()


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


@pytest.fixture
def etcd_with_tls(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Return a running etcd of one member with TLS and accounts."""
    for cluster in running_etcd(tmp_path, 1, tls=True):
        cluster.turn_accounts_on("test")
        yield cluster


def running_etcd(directory: Path, members: int, *, tls: bool = False) -> Iterator[EtcdCluster]:
    need_program("etcd", "etcd-server")
    need_module("grpc")
    from support.etcd_cluster import EtcdCluster  # noqa: PLC0415 - imports grpc, which a machine may lack

    cluster = EtcdCluster(directory, members)
    if tls:
        cluster.use_tls()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def nodes(tmp_path: Path, agents: Agents) -> Iterator[Nodes]:
    """Return what starts nodes."""
    nodes = Nodes(tmp_path, agents)
    yield nodes
    nodes.stop()


@pytest.fixture
def fleet_control(etcd: EtcdCluster) -> FleetControl:
    """Return the command line on ``etcd``."""
    return FleetControl(etcd.url())
