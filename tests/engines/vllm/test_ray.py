"""What the Ray actors that vLLM starts get of our settings, by vLLM's own list of what to copy. No Ray is started."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from vllm_serving import engine_environment

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHER = """
import json, os
from vllm.ray.ray_env import get_env_vars_to_copy
from kvcached.engines.vllm import register
register()
register()
copied = get_env_vars_to_copy()
print(json.dumps({name: os.environ[name] for name in copied if name in os.environ}))
"""

ACTOR = """
import sys, types
sys.modules["ray"] = types.SimpleNamespace(
    is_initialized=lambda: True,
    get_runtime_context=lambda: types.SimpleNamespace(get_actor_id=lambda: "an actor"),
)
import vllm.envs
from kvcached.engines.vllm import register
from kvcached.engines.vllm.process import engine_core_settings
register()
print(engine_core_settings().instance_name)
"""


def run(program: str, environment: dict[str, str], directory: Path) -> str:
    """Run a program; return its last line."""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, cwd=directory
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an engine's environment with settings that must not get lost."""
    return engine_environment(
        tmp_path / "ledger",
        "rayed",
        KVCACHED_STRICT="1",
        KVCACHED_MAX_CACHED_TOKENS="123",
        VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY="MINE_, THEIRS_",
        MINE_TOO="1",
    )


def test_ray_actors_get_our_settings(environment: dict[str, str], tmp_path: Path) -> None:
    """Name, directory, startup limit and strictness are copied, and so is what the user wants copied."""
    copied = json.loads(run(LAUNCHER, environment, tmp_path))
    for name in ("INSTANCE_NAME", "LEDGER_DIR", "MAX_CACHED_TOKENS", "STRICT"):
        assert copied[f"KVCACHED_{name}"] == environment[f"KVCACHED_{name}"]
    assert copied["MINE_TOO"] == "1"


def test_ray_actors_hear_that_the_plugin_is_disabled(environment: dict[str, str], tmp_path: Path) -> None:
    """``KVCACHED_DISABLE=1`` holds in them, too, although it keeps the plugin out of the launcher."""
    copied = json.loads(run(LAUNCHER, environment | {"KVCACHED_DISABLE": "1"}, tmp_path))
    assert copied["KVCACHED_DISABLE"] == "1"


def test_the_ranks_of_a_launch_without_a_name_are_one_instance(environment: dict[str, str], tmp_path: Path) -> None:
    """Engine cores that Ray starts, which have no parent process, go by the launcher's process id."""
    del environment["KVCACHED_INSTANCE_NAME"]
    copied = json.loads(run(LAUNCHER, environment, tmp_path))
    names = [run(ACTOR, environment | copied, tmp_path) for _ in range(2)]
    assert names == [copied["KVCACHED_LAUNCH"]] * 2
    assert names[0].startswith("vllm-")
