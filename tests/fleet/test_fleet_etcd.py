"""Agents and operators on a real etcd."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from support.commands import wait_for

from kvcached.control import get_instances, set_prefix_cache_retention_limit
from kvcached.fleet.fleet_url import parse_fleet_url
from kvcached.fleet.operations import signed
from kvcached.fleet.sources import open_operator
from kvcached.fleet.store import Hold

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.commands import Toys
    from support.etcd_cluster import EtcdCluster
    from support.fleet import Agents

    from kvcached.fleet.etcd.etcd_operator import FleetOperator


@pytest.fixture
def operator(etcd: EtcdCluster) -> Iterator[FleetOperator]:
    """Return an operator of the fleet ``test`` in ``etcd``."""
    with open_operator(parse_fleet_url(etcd.url())) as operator:
        yield operator


def limit_of(directory: Path) -> int:
    found = get_instances(directory)
    return found[0].replicas[0].members[0].limit_tokens if found else 0


def state_of(operator: FleetOperator, node: str = "n1", instance: str = "chat") -> str:
    found = [one.status.state for one in operator.read().targets if (one.node, one.instance) == (node, instance)]
    return found[0] if found else ""


def write(operator: FleetOperator, limit: int, revision: int | None = None) -> int:
    """Write a document with this limit over what is there; the revision of the write."""
    stored = operator.read().documents.get("chat")
    last = int(stored.revision) if stored else 0
    return operator.write("chat", signed({"limit_tokens": limit}, ""), last if revision is None else revision).revision


def test_a_document_is_applied_reported_and_followed(
    agents: Agents, toys: Toys, etcd: EtcdCluster, operator: FleetOperator
) -> None:
    """An agent applies what is written, says at which revision, applies the next one, and leaves nothing at its end."""
    toys.start("chat")
    revision = write(operator, 5000)
    agent = agents.start(etcd.url(), toys.directory, "--label", "gpu=A100")
    wait_for(lambda: state_of(operator) == "applied", "applied")
    view = operator.read()
    assert view.targets[0].status.observed == str(revision)
    assert view.agents["n1"]["labels"] == {"gpu": "A100"}
    write(operator, 6000)
    wait_for(lambda: limit_of(toys.directory) == 6000, "second document")
    agent.terminate()
    assert agent.wait(30) == 0
    assert operator.read().agents == {}
    assert operator.read().targets == ()


def test_a_deleted_document_changes_no_engine(
    agents: Agents, toys: Toys, etcd: EtcdCluster, operator: FleetOperator
) -> None:
    """After unset the engine keeps what it has, is unmanaged, and a document of a newer format changes nothing."""
    toys.start("chat")
    revision = write(operator, 5000)
    agents.start(etcd.url(), toys.directory)
    wait_for(lambda: state_of(operator) == "applied", "applied")
    assert operator.write("chat", None, revision).revision > revision
    wait_for(lambda: state_of(operator) == "unmanaged", "unmanaged")
    key = "/kvcached/test/desired/chat"
    operator._client.compare_and_set(key, b'{"format":2,"id":"x","limit_tokens":1}', 0)
    wait_for(lambda: state_of(operator) == "unsupported_document", "unsupported document")
    assert limit_of(toys.directory) == 5000


@pytest.mark.fleet
def test_a_hold_keeps_the_fleet_off_one_target(
    agents: Agents, toys: Toys, etcd: EtcdCluster, operator: FleetOperator
) -> None:
    """Under a hold a local limit stays; when the hold ends by its time the fleet's one is back."""
    toys.start("chat")
    write(operator, 5000)
    agents.start(etcd.url(), toys.directory)
    wait_for(lambda: state_of(operator) == "applied", "applied")
    operator.hold("n1", "chat", Hold("trial", time.time() + 4))
    wait_for(lambda: state_of(operator) == "on_hold", "hold")
    set_prefix_cache_retention_limit(7000, instance_name="chat", ledger_dir=toys.directory)
    time.sleep(1.5)
    assert limit_of(toys.directory) == 7000
    wait_for(lambda: limit_of(toys.directory) == 5000, "the fleet's limit")


@pytest.mark.fleet
def test_of_writes_that_compared_one_revision_exactly_one_wins(etcd: EtcdCluster, operator: FleetOperator) -> None:
    """Two operators write 50 times each over what they read: no write is lost unseen, and revisions grow."""
    wins: list[int] = []
    lost = [0]

    def compete() -> None:
        with open_operator(parse_fleet_url(etcd.url())) as mine:
            for number in range(50):
                won = write(mine, 1000 + number)
                if won:
                    wins.append(won)
                else:
                    lost[0] += 1

    threads = [threading.Thread(target=compete) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(wins)} writes won, {lost[0]} lost")
    assert len(set(wins)) == len(wins)
    first = operator._client.get("/kvcached/test/desired/chat")
    assert first is not None
    assert first.revision == max(wins)
    assert operator.read().revision == max(wins) == 1 + len(wins)


@pytest.mark.fleet
def test_a_second_machine_of_one_node_name_does_nothing(
    agents: Agents, toys: Toys, etcd: EtcdCluster, operator: FleetOperator, tmp_path: Path
) -> None:
    """An agent whose node's name belongs to another ledger directory says so, and the first one's statuses stay."""
    toys.start("chat")
    write(operator, 5000)
    agents.start(etcd.url(), toys.directory)
    wait_for(lambda: state_of(operator) == "applied", "applied")
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    agents.start(etcd.url(), other)
    wait_for(lambda: "give this agent another --node" in agents.log(), "refusal")
    assert state_of(operator) == "applied"


@pytest.mark.fleet
def test_an_agent_that_freezes_is_lost_and_comes_back(
    agents: Agents, toys: Toys, etcd: EtcdCluster, operator: FleetOperator
) -> None:
    """After its lease an agent that does not answer is gone from the fleet; once it runs again all is written again."""
    toys.start("chat")
    write(operator, 5000)
    agent = agents.start(etcd.url(), toys.directory, "--lease", "3")
    wait_for(lambda: state_of(operator) == "applied", "applied")
    agent.send_signal(19)
    began = time.monotonic()
    wait_for(lambda: state_of(operator) == "", "loss")
    print(f"lost after {time.monotonic() - began:.1f} s")
    write(operator, 6000)
    assert limit_of(toys.directory) == 5000
    agent.send_signal(18)
    wait_for(lambda: state_of(operator) == "applied" and limit_of(toys.directory) == 6000, "return")


@pytest.mark.fleet
def test_a_fleet_at_rest_writes_nothing(agents: Agents, toys: Toys, etcd: EtcdCluster, operator: FleetOperator) -> None:
    """Once everything is applied the store's revision does not move, though leases are renewed."""
    toys.start("chat")
    write(operator, 5000)
    agents.start(etcd.url(), toys.directory, "--lease", "3")
    wait_for(lambda: state_of(operator) == "applied", "applied")
    time.sleep(0.5)
    before = etcd.revision()
    time.sleep(4)
    assert etcd.revision() == before
    assert state_of(operator) == "applied"
