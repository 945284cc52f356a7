"""The hooks are there whenever SGLang loads its plugins, and wherever its scheduler is built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sglang_server import HERE, engine_path, needs_old_release_shim, prompt

if TYPE_CHECKING:
    from conftest import Serve

SUPPORT = Path(__file__).parent / "support_loading.py"


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the support program in a process without a scheduler."""
    environment = {**os.environ, "KVCACHED_INSTANCE_NAME": "loading", "PYTHONPATH": os.pathsep.join(engine_path())}
    command = [sys.executable, str(SUPPORT), *arguments]
    return subprocess.run(
        command, env={**environment, **environ}, capture_output=True, text=True, timeout=300, check=False
    )


def said(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what the support program printed last."""
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("order", ["plugins-first", "scheduler-first", "plugins-twice"])
def test_every_target_is_hooked_once_in_whatever_order_modules_are_loaded(order: str) -> None:
    """Plugins may be loaded before or after the scheduler module; copies of the hooked function are hooked, too."""
    found = said(run(order))
    assert set(found["hooks"].values()) == {1}, found["hooks"]
    assert found["report"] == 0
    assert found["stale"] == []
    assert found["imported_by_plugin"] is False


def test_a_process_that_gets_an_unsupported_scheduler_later_reports_it() -> None:
    """Where plugins come first, a missing target is found out when the module arrives, and the scheduler reports it."""
    found = said(run("plugins-first", "missing"))
    assert set(found["hooks"].values()) == {0}
    assert found["report"] == 1


def test_a_strict_process_refuses_when_the_scheduler_module_arrives() -> None:
    """With KVCACHED_STRICT=1 the import of an unsupported scheduler ends the process with the reason."""
    ran = run("plugins-first", "missing", KVCACHED_STRICT="1")
    assert ran.returncode != 0
    assert "release_kv_cache" in ran.stderr
    assert "KVCACHED_STRICT=1 forbids" in ran.stderr


@pytest.mark.skipif(
    needs_old_release_shim(), reason="the shim for this release has the only place at a process's start"
)
def test_a_server_whose_processes_load_plugins_first_is_governed(serve: Serve, plain_model: Path, probes: Path) -> None:
    """A release that loads plugins before it imports its scheduler takes limits over on both ranks."""
    path = os.pathsep.join([str(HERE / "early"), str(probes), str(HERE / "probes"), *engine_path()])
    environ = {"PYTHONPATH": path, "KVCACHED_MAX_CACHED_TOKENS": "0"}
    server = serve(plain_model, "--tp-size", "2", environ=environ)
    server.generate(prompt(1, 300))
    assert server.generate(prompt(1, 300)).cached_tokens == 0
    server.apply_limit(-1)
    server.generate(prompt(1, 300))
    assert server.generate(prompt(1, 300)).cached_tokens == 299
