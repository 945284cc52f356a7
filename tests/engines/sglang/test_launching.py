"""The plugin is there however SGLang is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from sglang_server import ENVIRONMENT, HERE, INSTANCE, bind_ranks, engine_path, prompt

from kvcached.engines.sglang.launching import LaunchNames

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Serve


@dataclass
class Scheduler:
    """A process as multiprocessing shows it to the one that started it."""

    process: subprocess.Popen[bytes]

    @property
    def exitcode(self) -> int | None:
        """How it ended, None while it runs."""
        return self.process.poll()


def test_the_serve_command_is_governed(serve: Serve, plain_model: Path) -> None:
    """A server started by ``sglang serve`` takes a limit over."""
    entry = ("-c", "import sys; from sglang.cli.main import main; sys.exit(main())", "serve")
    server = serve(plain_model, entry=entry)
    server.generate(prompt(1, 300))
    server.apply_limit(0)
    assert server.generate(prompt(1, 300)).cached_tokens == 0


def run(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this folder with the engine's environment; an empty value removes a variable."""
    environment = {**os.environ, **ENVIRONMENT, **bind_ranks(), "PYTHONPATH": os.pathsep.join(engine_path()), **environ}
    return subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_an_engine_inside_a_program_is_governed(plain_model: Path, tmp_path: Path) -> None:
    """An ``Engine`` object takes a limit over that the program around it publishes."""
    ran = run("support_engine.py", str(plain_model), INSTANCE, KVCACHED_LEDGER_DIR=str(tmp_path / "ledgers"))
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {"applied": True, "cached": [0, 199, 0]}


def test_two_unnamed_engines_of_one_program_have_names_of_their_own(plain_model: Path, tmp_path: Path) -> None:
    """Each is governed by itself, and the program's environment is left as it was."""
    environ = {"KVCACHED_INSTANCE_NAME": "", "PYTHONSAFEPATH": ""}
    path = os.pathsep.join([*engine_path(), str(HERE)])
    ran = run(
        "support_two_engines.py",
        str(plain_model),
        **environ,
        PYTHONPATH=path,
        KVCACHED_LEDGER_DIR=str(tmp_path / "ledgers"),
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "names": ["sglang-PID", "sglang-PID-2"],
        "applied": True,
        "cached": [199, 0],
        "left": "",
    }


def test_a_name_is_free_again_when_its_engine_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches get the first name that no running engine has; a name that the operator gave is left alone."""
    monkeypatch.delenv("KVCACHED_INSTANCE_NAME", raising=False)
    names = LaunchNames("sglang-1")
    with ExitStack() as running:
        processes = [running.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE)) for _ in range(2)]
        seen = []
        for process in processes:
            with names.name_launch() as tell:
                seen.append(os.environ["KVCACHED_INSTANCE_NAME"])
                tell((None, [Scheduler(process)]))
        with suppress(RuntimeError), names.name_launch():
            raise RuntimeError  # a launch that fails keeps no name
        processes[0].communicate()
        with names.name_launch() as tell:
            seen.append(os.environ["KVCACHED_INSTANCE_NAME"])
            tell((None, None))
        with names.name_launch():
            seen.append(os.environ["KVCACHED_INSTANCE_NAME"])
    assert seen == ["sglang-1", "sglang-1-2", "sglang-1", "sglang-1-3"]
    assert "KVCACHED_INSTANCE_NAME" not in os.environ
    monkeypatch.setenv("KVCACHED_INSTANCE_NAME", "given")
    with names.name_launch():
        assert os.environ["KVCACHED_INSTANCE_NAME"] == "given"
    assert os.environ["KVCACHED_INSTANCE_NAME"] == "given"


@pytest.mark.parametrize("strict", ["", "1"])
def test_a_launch_through_ray_says_that_it_is_not_controlled(tmp_path: Path, strict: str) -> None:
    """SGLang's own Ray launcher, with a stand-in for Ray, is refused when strict, and goes on with a word otherwise."""
    path = os.pathsep.join([*engine_path(), str(HERE / "ray_stand_in")])
    ran = run("support_ray.py", PYTHONPATH=path, KVCACHED_LEDGER_DIR=str(tmp_path), KVCACHED_STRICT=strict)
    text = ran.stdout + ran.stderr
    assert "starts its schedulers as Ray actors, which load no plugins" in text, text[-4000:]
    assert ("KVCACHED_STRICT=1 forbids" in text) == bool(strict)
    assert ("reached Ray" in text) == (not strict)


def test_a_launch_through_ray_whose_actors_load_plugins_is_let_through(tmp_path: Path) -> None:
    """Once SGLang's actor loads plugins itself, nothing is said and nothing refused."""
    path = os.pathsep.join([*engine_path(), str(HERE / "ray_stand_in")])
    ran = run("support_ray.py", "loading", PYTHONPATH=path, KVCACHED_LEDGER_DIR=str(tmp_path), KVCACHED_STRICT="1")
    text = ran.stdout + ran.stderr
    assert "Ray actors" not in text
    assert "reached Ray" in text, text[-4000:]
