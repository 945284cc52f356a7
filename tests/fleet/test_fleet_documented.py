"""docs/fleet.md and its recipes: every command is run in its order, on a real etcd, agents and engines."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from support.commands import Toys, run, wait_for

from kvcached.fleet.__main__ import _parser
from kvcached.fleet.file import FileSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.etcd_cluster import EtcdCluster
    from support.fleet import Agents

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/fleet.md").read_text()
POD = ROOT / "docs/containers/pod-fleet.yaml"
UNIT = ROOT / "docs/systemd/kvcached-agent.service"


def commands() -> list[list[str]]:
    """Return the words of all commands of the page, in order."""
    found = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
    return [shlex.split(line.removesuffix("&")) for line in found]


@pytest.fixture
def engines() -> Iterator[list[Toys]]:
    """Return the engines that a test started; they are ended after it."""
    engines: list[Toys] = []
    yield engines
    for toys in engines:
        toys.stop()


@pytest.mark.fleet
def test_the_page_can_be_followed(
    etcd: EtcdCluster, tmp_path: Path, agents: Agents, engines: list[Toys], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands succeed in their order; only the rigs are toys here, and the etcd has another port."""
    monkeypatch.setenv("KVCACHED_FLEET", etcd.url("prod"))
    monkeypatch.chdir(tmp_path)
    played = 0
    for words in commands():
        if words[:1] == ["mkdir"]:
            subprocess.run(words, check=True)
        elif "kvcached.rig" in words:
            engines.append(Toys(tmp_path / words[-1]))
            engines[-1].start(words[words.index("--instance") + 1], cap_floor=1000)
        elif words[0] == "kvcached-agent" and "--node" in words:
            agents.started.append(subprocess.Popen([sys.executable, "-m", "kvcached.fleet", *words[1:]]))
        elif words[0] == "kvcached-control":
            result = run([sys.executable, "-m", "kvcached.control", *words[1:]])
            assert result.returncode == 0, (words, result.stderr)
            played += 1
    assert played >= 8


def test_the_file_of_the_page_is_applied(
    agents: Agents, tmp_path: Path, engines: list[Toys], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first agent of the page applies the documents that the page shows."""
    monkeypatch.chdir(tmp_path)
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "desired.json").write_text(text)
    (tmp_path / "node1").mkdir(mode=0o700)
    engines.append(Toys(tmp_path / "node1"))
    engines[0].start("chat", cap_floor=1000)
    (words,) = [words for words in commands() if words[0] == "kvcached-agent" and "file:desired.json" in words]
    agents.started.append(subprocess.Popen([sys.executable, "-m", "kvcached.fleet", *words[1:]]))
    status = tmp_path / "status.json"
    wait_for(lambda: status.exists() and json.loads(status.read_text())["targets"]["chat"]["state"] == "applied", "it")


def test_the_recipes_call_the_agent_as_it_is() -> None:
    """Pod and unit give options that exist, and the pod's ConfigMap has valid documents."""
    config, pod = yaml.safe_load_all(POD.read_text())
    containers: list[dict[str, Any]] = pod["spec"]["containers"]
    (command,) = [one["command"] for one in containers if one["name"] == "agent"]
    assert _parser().parse_args(command[1:]).status_file == "/status/status.json"
    (start,) = re.findall(r"^ExecStart=\S+ (.*)$", UNIT.read_text(), re.MULTILINE)
    _parser().parse_args(start.replace("%H", "node").split())
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    mounted = [mount for one in [*containers, *pod["spec"]["initContainers"]] for mount in one["volumeMounts"]]
    assert {mount["name"] for mount in mounted} == volumes
    assert list(config["data"]) == ["desired.json"]


def test_the_documents_of_the_pod_are_valid(tmp_path: Path) -> None:
    """What the ConfigMap holds is read without a fault, for the instance that the engine is called."""
    config, pod = yaml.safe_load_all(POD.read_text())
    (tmp_path / "desired.json").write_text(config["data"]["desired.json"])
    wishes = FileSource(str(tmp_path / "desired.json"), "n1").read()
    names = [
        entry["value"] for entry in pod["spec"]["containers"][0]["env"] if entry["name"] == "KVCACHED_INSTANCE_NAME"
    ]
    assert (wishes.fault, list(wishes.documents)) == ("", names)


@pytest.mark.needs_program("systemd-analyze", "systemd")
@pytest.mark.skipif(os.geteuid() != 0, reason="systemd-analyze looks for the program and the user")
@pytest.mark.fleet
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """The unit has no setting that systemd does not know."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvcached/bin/kvcached-agent", "/bin/true"))
    result = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert "Unknown" not in result.stderr, result.stderr
