"""``kvcached-control`` with ``--fleet``: one command for all nodes, on a real etcd with real agents."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from support.commands import run, wait_for
from support.fleet import FleetControl

if TYPE_CHECKING:
    from pathlib import Path

    from support.etcd_cluster import EtcdCluster
    from support.fleet import Nodes

pytestmark = pytest.mark.fleet


def test_one_command_sets_all_nodes_and_waits_for_them(
    nodes: Nodes, etcd: EtcdCluster, fleet_control: FleetControl
) -> None:
    """A waiting set returns when each node applied it, a cap is added beside the limit, and unset changes no engine."""
    nodes.start(etcd.url(), "n1", "n2", cap_floor=100)
    code, said = fleet_control.run("set", "5k", "--instance", "chat", "--wait", "20", "--expect", "2", "--note", "why")
    assert (code, "applied by 2 target(s)" in said) == (0, True)
    assert nodes.limits() == [5000, 5000]
    assert fleet_control.run("cap", "50k", "--instance", "chat", "--wait", "20")[0] == 0
    found = fleet_control.json("status", "--instance", "chat")["instances"][0]
    assert found["document"]["limit_tokens"] == 5000
    assert [(one["state"], one["cap_tokens"]) for one in found["targets"]] == [("applied", 50_000)] * 2
    code, said = fleet_control.run("status")
    assert (code, "2 of 2 applied" in said) == (0, True)
    unchanged = fleet_control.json("set", "5k", "--instance", "chat", "--if-different")
    assert (unchanged["unchanged"], unchanged["revision"]) == (True, found["revision"])
    assert fleet_control.run("fleet", "unset", "--instance", "chat")[0] == 0
    assert nodes.limits() == [5000, 5000]


def test_a_write_over_another_revision_is_superseded(fleet_control: FleetControl) -> None:
    """--if-revision of a document that changed exits 5 and says what is stored."""
    first = fleet_control.json("set", "5k", "--instance", "chat")
    assert "no live engine" in first["warnings"][0]
    assert fleet_control.run("set", "6k", "--instance", "chat", "--if-revision", str(first["revision"]))[0] == 0
    code, said = fleet_control.run("set", "7k", "--instance", "chat", "--if-revision", str(first["revision"]))
    assert (code, "nothing was written" in said) == (5, True)
    assert fleet_control.run("set", "7k", "--instance", "nobody-*")[0] == 3


def test_labels_choose_nodes(nodes: Nodes, etcd: EtcdCluster, fleet_control: FleetControl) -> None:
    """--where changes only nodes with the label, and a later set for all takes the rule away."""
    nodes.start(etcd.url(), "n1", options=("--label", "gpu=A100"))
    nodes.start(etcd.url(), "n2")
    assert fleet_control.run("set", "5k", "--instance", "chat")[0] == 0
    assert (
        fleet_control.run("set", "3k", "--instance", "chat", "--where", "gpu=A100", "--wait", "--expect", "2")[0] == 0
    )
    assert nodes.limits() == [3000, 5000]
    assert fleet_control.run("set", "6k", "--instance", "chat", "--wait", "--expect", "2")[0] == 0
    assert nodes.limits() == [6000, 6000]


def test_who_refuses_or_lags_or_is_lost_is_named(nodes: Nodes, etcd: EtcdCluster, fleet_control: FleetControl) -> None:
    """Bounds of a node exit 7, an engine that takes nothing exits 6, an agent that ended exits 4, each named."""
    nodes.start(etcd.url(), "n1", options=("--min-limit", "1k"))
    nodes.start(etcd.url(), "deaf", options=("--lease", "3"), trouble="deaf")
    wait_for(lambda: fleet_control.agents() == 2, "agents")
    code, said = fleet_control.run("set", "10", "--instance", "chat", "--wait", "20")
    assert (code, "n1 will not apply it: refused_by_node" in said) == (7, True)
    code, said = fleet_control.run("set", "5k", "--instance", "chat", "--wait", "2")
    assert (code, "deaf has not applied it" in said) == (6, True)
    waiting = subprocess.Popen(
        fleet_control.command("set", "6k", "--instance", "chat", "--wait", "30"), stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: nodes.limit("n1") == 6000, "the write")
    nodes.agents.started[1].kill()
    _, errors = waiting.communicate(timeout=40)
    assert (waiting.returncode, "deaf was lost" in errors) == (4, True)


def test_a_store_that_is_away_is_said_and_changes_nothing(
    nodes: Nodes, etcd: EtcdCluster, fleet_control: FleetControl
) -> None:
    """Without etcd commands exit 3, engines keep their limit, and a restarted engine still gets the fleet's."""
    nodes.start(etcd.url(), "n1")
    assert fleet_control.run("set", "5k", "--instance", "chat", "--wait", "20")[0] == 0
    etcd.stop()
    assert fleet_control.run("set", "6k", "--instance", "chat")[0] == 3
    assert fleet_control.run("status")[0] == 3
    nodes.toys["n1"].stop()
    nodes.toys["n1"].start("chat")
    wait_for(lambda: nodes.limit("n1") == 5000, "the fleet's limit")
    etcd.restart(0)
    etcd.wait_until_ready()
    assert fleet_control.run("set", "7k", "--instance", "chat", "--wait", "20")[0] == 0
    assert nodes.limits() == [7000]


def test_what_is_about_one_engine_is_refused_for_a_fleet(fleet_control: FleetControl) -> None:
    """Percentages, dry runs, fleets in files and options without --fleet are usage errors."""
    for words in (("50%",), ("5k", "--dry-run"), ("5k", "--waves", "50,20"), ("5k", "--where", "gpu")):
        assert fleet_control.run("set", *words, "--instance", "chat")[0] == 2
    assert FleetControl("file:/tmp/x").run("set", "5k", "--instance", "chat")[0] == 2
    local = [*fleet_control.command("set", "5k", "--instance", "chat")[:-2], "--waves", "100"]
    assert run(local).returncode == 2


def test_a_roll_out_pauses_at_a_bad_node_and_is_resumed_and_rolled_back(
    nodes: Nodes, etcd: EtcdCluster, fleet_control: FleetControl, tmp_path: Path
) -> None:
    """Waves reach exactly their targets, a bad node pauses them, resume ends them, and one write takes all back."""
    names = [f"n{number}" for number in range(4)]
    nodes.start(etcd.url(), *names)
    assert fleet_control.run("set", "9k", "--instance", "chat", "--wait", "20", "--expect", "4")[0] == 0
    marker = tmp_path / "good"
    options = ("--instance", "chat", "--check", f"test -e {marker}")
    code, said = fleet_control.run("set", "5k", *options, "--waves", "25,50,100")
    assert (code, "paused: the check ended with exit code 1" in said) == (4, True)
    assert sorted(nodes.limits()) == [5000, 9000, 9000, 9000]
    code, _ = fleet_control.run("set", "4k", "--instance", "chat", "--waves", "100")
    assert code == 5
    first = nodes.limits().index(5000)
    marker.touch()
    assert fleet_control.run("fleet", "resume", *options)[0] == 0
    assert nodes.limits() == [5000] * 4
    assert fleet_control.run("fleet", "rollback", "--instance", "chat")[0] == 0
    wait_for(lambda: nodes.limits() == [9000] * 4, "the former limit")
    print(f"first was {names[first]}")


def test_a_roll_out_whose_driver_died_is_resumed_by_another(
    nodes: Nodes, etcd: EtcdCluster, fleet_control: FleetControl
) -> None:
    """After kill -9 of the driver nothing moves, and a second driver goes on from what is stored."""
    nodes.start(etcd.url(), "n1", "n2", "n3")
    wait_for(lambda: len(fleet_control.json("status")["instances"][:1]) == 1 and fleet_control.agents() == 3, "agents")
    wait_for(lambda: len(fleet_control.json("status")["instances"][0]["targets"]) == 3, "targets")
    command = fleet_control.command("set", "5k", "--instance", "chat", "--waves", "30,100", "--soak", "60")
    driver = subprocess.Popen(command)
    wait_for(lambda: nodes.limits().count(5000) == 1, "first wave")
    driver.kill()
    driver.wait()
    time.sleep(0.5)
    assert nodes.limits().count(5000) == 1
    assert fleet_control.run("fleet", "resume", "--instance", "chat")[0] == 0
    assert nodes.limits() == [5000] * 3
    assert fleet_control.json("status")["instances"][0]["document"]["rollout"]["state"] == "done"


def test_holds_are_set_and_ended_by_command(nodes: Nodes, etcd: EtcdCluster, fleet_control: FleetControl) -> None:
    """A held node keeps its limit while the fleet's changes, and takes it on release."""
    nodes.start(etcd.url(), "n1", "n2")
    assert fleet_control.run("set", "5k", "--instance", "chat", "--wait", "20", "--expect", "2")[0] == 0
    hold = ("--instance", "chat", "--node", "n1")
    assert fleet_control.run("fleet", "hold", *hold, "--for", "2h", "--note", "trial")[0] == 0
    wait_for(lambda: "trial" in fleet_control.run("status")[1], "hold")
    assert fleet_control.run("set", "6k", "--instance", "chat", "--wait", "20")[0] == 0
    assert nodes.limits() == [5000, 6000]
    assert fleet_control.run("fleet", "release", *hold)[0] == 0
    wait_for(lambda: nodes.limits() == [6000, 6000], "release")
