"""What goes wrong with a store of three real members: engines keep their limits, and all is made good by itself."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from support.commands import wait_for
from support.fleet import FleetControl

from kvcached.fleet.fleet_url import parse_fleet_url
from kvcached.fleet.operations import signed
from kvcached.fleet.sources import open_operator

if TYPE_CHECKING:
    from pathlib import Path

    from support.etcd_cluster import EtcdCluster
    from support.fleet import Nodes

    from kvcached.fleet.etcd.etcd_operator import FleetOperator

pytestmark = pytest.mark.fleet


def write(operator: FleetOperator, limit: int) -> int:
    """Write a document with this limit over what is there; the revision of the write, 0 if it did not succeed."""
    stored = operator.read().documents.get("chat")
    last = int(stored.revision) if stored else 0
    return operator.write("chat", signed({"limit_tokens": limit}, ""), last).revision


def test_no_acknowledged_write_is_lost_when_the_leader_is_killed(nodes: Nodes, etcd_of_three: EtcdCluster) -> None:
    """Sets go on through a leader's death: each is acknowledged or known not to be, and the last one is applied."""
    nodes.start(etcd_of_three.url(), "n1")
    nodes.start(etcd_of_three.url(first=1), "n2")
    acknowledged = 0
    with open_operator(parse_fleet_url(etcd_of_three.url())) as operator:
        assert write(operator, 999)
        leader = etcd_of_three.leader()
        began = time.monotonic()
        for number in range(30):
            if number == 10:
                etcd_of_three.processes[leader].kill()
            limit = 1000 + number
            deadline = time.monotonic() + 20
            while not _try_to_write(operator, limit):
                assert time.monotonic() < deadline
            acknowledged = limit
        print(f"30 writes in {time.monotonic() - began:.1f} s, leader killed after 10")
        stored = operator.read().documents["chat"].desired
        assert stored is not None
        assert stored.rules.tokens.limit_tokens == acknowledged
    began = time.monotonic()
    wait_for(lambda: nodes.limits() == [acknowledged] * 2, "the last limit")
    print(f"everywhere after {time.monotonic() - began:.1f} s")


def _try_to_write(operator: FleetOperator, limit: int) -> bool:
    from kvcached.fleet.etcd.etcd_client import EtcdError  # noqa: PLC0415 - imports grpc, which a machine may lack

    try:
        return write(operator, limit) > 0
    except EtcdError:
        return False


def test_without_a_quorum_nothing_changes_and_afterwards_all_is_reported_again(
    nodes: Nodes, etcd_of_three: EtcdCluster
) -> None:
    """Two of three members freeze for longer than a lease: engines keep their limit, set exits 3, statuses return."""
    control = FleetControl(etcd_of_three.url())
    nodes.start(etcd_of_three.url(), "n1", options=("--lease", "6"))
    assert control.run("set", "5k", "--instance", "chat", "--wait", "20")[0] == 0
    frozen = [etcd_of_three.processes[index] for index in (0, 1)]
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert control.run("set", "6k", "--instance", "chat")[0] == 3
    time.sleep(max(0.0, 10 - (time.monotonic() - began)))
    assert nodes.limits() == [5000]
    for process in frozen:
        process.send_signal(signal.SIGCONT)
    etcd_of_three.wait_until_ready()
    assert control.run("set", "7k", "--instance", "chat", "--wait", "25")[0] == 0
    assert nodes.limits() == [7000]


def test_an_agent_leaves_a_member_that_is_frozen(nodes: Nodes, etcd_of_three: EtcdCluster) -> None:
    """A member that accepts connections and answers nothing is left within 20 s, watch and statuses alike."""
    nodes.start(etcd_of_three.url(), "n1")
    control = FleetControl(etcd_of_three.url(first=1))
    assert control.run("set", "5k", "--instance", "chat", "--wait", "20")[0] == 0
    etcd_of_three.processes[0].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with open_operator(parse_fleet_url(etcd_of_three.url(first=1))) as operator:
        while not _try_to_write(operator, 6000):
            assert time.monotonic() - began < 15
    wait_for(lambda: nodes.limits() == [6000], "the next limit")
    elapsed = time.monotonic() - began
    print(f"applied {elapsed:.1f} s after the freeze")
    assert elapsed < 20


def test_a_compaction_past_a_stopped_agent_costs_it_nothing(nodes: Nodes, etcd: EtcdCluster) -> None:
    """An agent that was stopped across 20 writes and a compaction has the newest limit soon after it goes on."""
    nodes.start(etcd.url(), "n1")
    control = FleetControl(etcd.url())
    assert control.run("set", "5k", "--instance", "chat", "--wait", "20")[0] == 0
    (agent,) = nodes.agents.started
    agent.send_signal(signal.SIGSTOP)
    with open_operator(parse_fleet_url(etcd.url())) as operator:
        for number in range(20):
            assert write(operator, 6000 + number)
        etcd.etcdctl("compact", str(etcd.revision()))
        assert write(operator, 7000)
        _check_that_an_old_watch_ends(operator)
    began = time.monotonic()
    agent.send_signal(signal.SIGCONT)
    wait_for(lambda: nodes.limits() == [7000], "the newest limit")
    print(f"applied {time.monotonic() - began:.3f} s after the agent went on")


def _check_that_an_old_watch_ends(operator: FleetOperator) -> None:
    from kvcached.fleet.etcd.etcd_client import EtcdError  # noqa: PLC0415 - imports grpc, which a machine may lack

    with pytest.raises(EtcdError, match="compacted"):
        list(operator._client.watch(("/kvcached/test/desired/",), 1))


def test_agents_follow_a_store_that_was_restored_from_an_older_snapshot(nodes: Nodes, etcd: EtcdCluster) -> None:
    """After a restore the older document is applied, and later changes as well, though revisions became smaller."""
    nodes.start(etcd.url(), "n1")
    control = FleetControl(etcd.url())
    assert control.run("set", "5k", "--instance", "chat", "--wait", "20")[0] == 0
    snapshot = etcd.directory / "snapshot.db"
    etcd.etcdctl("snapshot", "save", str(snapshot))
    for limit in ("6k", "7k"):
        assert control.run("set", limit, "--instance", "chat", "--wait", "20")[0] == 0
    etcd.stop()
    shutil.rmtree(etcd.directory / "m0")
    etcd.restore(snapshot)
    etcd.restart(0)
    etcd.wait_until_ready()
    wait_for(lambda: nodes.limits() == [5000], "the restored limit")
    assert control.run("set", "8k", "--instance", "chat", "--wait", "25")[0] == 0
    assert nodes.limits() == [8000]


def test_agents_killed_at_random_moments_publish_each_change_once(nodes: Nodes, etcd: EtcdCluster) -> None:
    """Killed and restarted 15 times, an agent never publishes an unchanged document again."""
    seed = 16
    print(f"seed {seed}")
    dice = random.Random(seed)
    nodes.start(etcd.url(), "n1")
    ledgers = nodes.directory / "n1" / "ledgers"
    changes = 0
    with open_operator(parse_fleet_url(etcd.url())) as operator:
        for _ in range(15):
            if dice.random() < 0.5:
                changes += 1
                assert write(operator, 1000 + changes)
            time.sleep(dice.uniform(0.3, 2.0))
            nodes.agents.started[-1].kill()
            nodes.agents.started[-1].wait()
            assert nodes.revision("n1") <= changes
            nodes.agents.start(etcd.url(), ledgers)
        wait_for(lambda: nodes.limits() == [1000 + changes], "the last limit")
    print(f"{changes} changes, ledger revision {nodes.revision('n1')}")
    assert 0 < nodes.revision("n1") <= changes


def test_a_write_whose_answer_is_cut_off_is_settled_by_reading_back(etcd: EtcdCluster) -> None:
    """An operator whose connection loses the answer of its write still knows that it was written."""
    proxy = CuttingProxy(etcd.clients[0])
    url = f"etcd://127.0.0.1:{proxy.port},{etcd.clients[0]}/test"
    with open_operator(parse_fleet_url(url)) as operator:
        assert operator.read().revision == 1
        proxy.cutting.set()
        revision = operator.write("chat", signed({"limit_tokens": 5000}, ""), 0).revision
        assert revision == 2
        assert proxy.withheld > 0
        assert operator.read().documents["chat"].revision == str(revision)
    proxy.close()


class CuttingProxy:
    """Forwards connections to a server, and once ``cutting`` is set withholds whatever the server answers."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.cutting = threading.Event()
        self.withheld = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            threading.Thread(target=self._forward, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, True), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:  # noqa: FBT001 - of a thread
        try:
            while data := source.recv(65536):
                if answers and self.cutting.is_set():
                    self.withheld += len(data)
                else:
                    sink.sendall(data)
        except OSError:
            sink.close()


@pytest.mark.needs_program("openssl", "openssl")
def test_certificates_and_roles_keep_agents_to_their_own_keys(nodes: Nodes, etcd_with_tls: EtcdCluster) -> None:
    """Over TLS with etcd's accounts on, an agent applies and reports, and its role cannot write what is desired."""
    certificates = etcd_with_tls.directory
    operator, agent = (_environment(certificates, name) for name in ("root", "agent-n1"))
    os.environ.update(agent)
    try:
        nodes.start(etcd_with_tls.url(), "n1")
        control = FleetControl(etcd_with_tls.url())
        code, said = control.run("set", "5k", "--instance", "chat")
        assert (code, "permission denied" in said) == (3, True)
        os.environ.update(operator)
        assert control.run("set", "5k", "--instance", "chat", "--wait", "20")[0] == 0
        assert nodes.limits() == [5000]
    finally:
        for name in agent:
            os.environ.pop(name)


def _environment(directory: Path, name: str) -> dict[str, str]:
    files = {"CA": "ca.pem", "CERT": f"{name}.pem", "KEY": f"{name}.key"}
    return {f"KVCACHED_FLEET_{kind}": str(directory / file) for kind, file in files.items()}


def test_statuses_of_many_agents_come_within_seconds(etcd: EtcdCluster) -> None:
    """Fifty simulated agents all report a change, and nothing is written afterwards."""
    from kvcached.fleet.agent import NodeIdentity  # noqa: PLC0415 - as above
    from kvcached.fleet.etcd.etcd_source import EtcdSource  # noqa: PLC0415 - as above
    from kvcached.fleet.target_status import TargetStatus  # noqa: PLC0415 - as above

    url = parse_fleet_url(etcd.url())
    sources = [EtcdSource(url, NodeIdentity(f"n{number}"), "/none") for number in range(50)]
    for source in sources:
        source.start(lambda: None)
    with open_operator(url) as operator:
        for _ in range(2):
            revision = str(write(operator, 5000))
            began = time.monotonic()
            while sum(one.status.observed == revision for one in operator.read().targets) < len(sources):
                for source in sources:
                    seen = source.read().documents
                    source.report({name: TargetStatus("applied", stored.revision) for name, stored in seen.items()})
                assert time.monotonic() - began < 30
                time.sleep(0.05)
            print(f"50 statuses {time.monotonic() - began:.2f} s after the write")
        before = etcd.revision()
        time.sleep(3)
        assert etcd.revision() == before
    for source in sources:
        source.close()
