"""The container recipes of the documentation: valid, consistent, and played with real namespaces and users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcached.control.commands.command_line import build_parser

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "docs" / "containers"
PLAYER = ROOT / "tests" / "support" / "containers.py"
PATIENCE_S = 60.0

COMMANDS = (
    ["status", "--json"],
    ["set", "5k", "--instance", "my-model", "--wait", "20", "--json"],
    ["status", "--json"],
    ["doctor"],
    "kill",
    ["status", "--json"],
    ["set", "1k", "--instance", "my-model"],
)


def compose() -> dict[str, Any]:
    """Return the compose file."""
    return dict(yaml.safe_load((RECIPES / "compose.yaml").read_text()))


def pod() -> dict[str, Any]:
    """Return the pod manifest."""
    return dict(yaml.safe_load((RECIPES / "pod.yaml").read_text()))


def can_unshare() -> bool:
    """Return whether this machine lets us make namespaces and mount in them."""
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--propagation",
        "private",
        "mount",
        "-t",
        "tmpfs",
        "none",
        "/mnt",
    ]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def compose_plan() -> dict[str, Any]:
    """Return the deployment of the compose file, for the player."""
    services, volumes = compose()["services"], compose()["volumes"]
    return {
        "volume": volumes["ledgers"]["driver_opts"]["o"],
        "init": None,
        "ledgers": "/mnt/shared",
        "engine": services["engine"]["user"],
        "control": services["control"]["user"],
    }


def pod_plan() -> dict[str, Any]:
    """Return the deployment of the pod, for the player: an emptyDir with fsGroup is writable by all."""
    spec = pod()["spec"]
    group = spec["securityContext"]["fsGroup"]
    users = {container["name"]: container["securityContext"]["runAsUser"] for container in spec["containers"]}
    return {
        "volume": f"size=4m,mode=2777,gid={group}",
        "init": spec["initContainers"][0]["command"],
        "ledgers": "/mnt/shared/ledgers",
        "engine": f"{users['engine']}:{group}",
        "control": f"{users['control']}:{group}",
    }


@pytest.mark.skipif(not can_unshare(), reason="needs root, and namespaces that may be made and mounted in")
@pytest.mark.parametrize("plan", [compose_plan, pod_plan])
def test_publish_apply_acknowledge_across_namespaces_and_users(plan: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """Two users of one group, in PID and mount namespaces of their own, share only the directory; all of it works."""
    (tmp_path / "volume").mkdir()
    whole = {**plan(), "folder": str(tmp_path / "volume"), "commands": COMMANDS}
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, str(PLAYER), json.dumps(whole)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.returncode == 0, result.stderr
    before, published, after, doctor, _, ended, late = json.loads(result.stdout)
    assert json.loads(before["output"])["instances"][0]["name"] == "my-model", before["errors"]
    outcome = json.loads(published["output"])
    assert (published["code"], outcome["applied"], len(outcome["gpus"])) == (0, True, 2), published
    (instance,) = json.loads(after["output"])["instances"]
    assert instance["replicas"][0]["applied"] == {"revision": 1, "limit_tokens": 5000}
    assert instance["pid"] < 10, "the engine has a PID namespace of its own"
    assert "my-model/0" in doctor["output"]
    assert "may be read and written (owner uid 2001, mode 2770)" in doctor["output"]
    assert json.loads(ended["output"])["instances"] == []
    assert late["code"] == 3


def test_commands_of_the_recipes_are_ours() -> None:
    """Every call of the command line in the recipes is one that its parser takes."""
    services = compose()["services"]
    calls = [services["metrics"]["command"], [*services["control"]["entrypoint"], *services["control"]["command"]]]
    calls += [container["command"] for container in pod()["spec"]["containers"]]
    ours = [call[1:] for call in calls if call[0] == "kvcached-control"]
    assert len(ours) == 3
    for arguments in ours:
        build_parser().parse_args(arguments)


def test_recipes_share_one_directory_and_nothing_else() -> None:
    """All parts name the same ledger directory and mount it, run as one group, and have read-only roots."""
    for service in compose()["services"].values():
        assert service["environment"]["KVCACHED_LEDGER_DIR"] == "/ledgers"
        assert any(volume.split(":")[:2] == ["ledgers", "/ledgers"] for volume in service["volumes"])
        assert service["user"].endswith(":3000")
        assert service["read_only"] is True
        assert not {"pid", "ipc", "privileged"} & service.keys()
    spec = pod()["spec"]
    assert spec["shareProcessNamespace"] is False
    for container in spec["containers"]:
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        assert environment["KVCACHED_LEDGER_DIR"] == "/shared/ledgers"
        assert any(mount["mountPath"] == "/shared" for mount in container["volumeMounts"])
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    volumes = {volume["name"] for volume in spec["volumes"]}
    used = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
    assert used == volumes
