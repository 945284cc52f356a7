"""What goes wrong around a real engine, and how it serves on, or refuses to start, in one clear sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from vllm_serving import (
    HIT_TOKENS,
    application,
    control,
    engine_environment,
    free_port,
    replicas,
    server_command,
    serving,
    set_limit,
    wait_until,
    with_plugin,
)

if TYPE_CHECKING:
    from pathlib import Path

START_REFUSED_WITHIN_S = 120


def our_warnings(log: str) -> list[str]:
    """Return the lines of a log that are warnings or errors of kvcached."""
    return [line for line in log.splitlines() if "kvcached" in line and ("WARNING" in line or "ERROR" in line)]


def refused_start(model: Path, directory: Path, environment: dict[str, str], *options: str) -> str:
    """Start a server that has to refuse; return what it printed."""
    done = subprocess.run(
        server_command(model, free_port(), *options),
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_REFUSED_WITHIN_S,
        check=False,
        cwd=directory,
    )
    assert done.returncode not in {0, -signal.SIGKILL}
    return done.stdout + done.stderr


def test_a_killed_core_leaves_no_live_slot_and_its_name_is_free(model: Path, tmp_path: Path) -> None:
    """After SIGKILL of the engine core the slot is dead at once, and a new engine takes the same name."""
    environment = engine_environment(tmp_path / "ledger", "phoenix")
    with serving(model, tmp_path, environment) as server:
        server.set(1000)
        (core,) = server.core_pids()
        os.kill(core, signal.SIGKILL)
        wait_until(lambda: not replicas("phoenix", tmp_path / "ledger"), 1.0, every_s=0.01)
        done = control("set", "0", "--instance", "phoenix", ledger_dir=tmp_path / "ledger")
        assert done.returncode == 3, done
    with serving(model, tmp_path, environment | {"KVCACHED_MAX_CACHED_TOKENS": "2000"}) as server:
        replica = server.replica()
        assert (replica["outcome"], replica["applied"]["limit_tokens"]) == ("startup", 2000)
        server.set(0)


def test_an_unwritable_ledger_directory_is_one_warning(model: Path, tmp_path: Path) -> None:
    """The engine serves as if nothing were wrong, under its startup limit, and says once what is."""
    (tmp_path / "file").write_text("in the way")
    ledger_dir = tmp_path / "file" / "ledger"
    environment = engine_environment(ledger_dir, "lonely", KVCACHED_MAX_CACHED_TOKENS="100")
    with application(model, tmp_path / "log", environment, one_process=True) as running:
        assert [running.cached_tokens(1), running.cached_tokens(1)] == [0, 96]
    (warning,) = our_warnings((tmp_path / "log").read_text())
    assert str(ledger_dir) in warning


def test_a_startup_limit_that_is_no_number_stops_the_start(model: Path, tmp_path: Path) -> None:
    """``KVCACHED_MAX_CACHED_TOKENS=lots`` refuses the start with one sentence that says what to write."""
    environment = engine_environment(tmp_path / "ledger", "lots", KVCACHED_MAX_CACHED_TOKENS="lots")
    printed = refused_start(model, tmp_path, environment)
    sentences = [line for line in printed.splitlines() if "KVCACHED_MAX_CACHED_TOKENS" in line]
    assert len(sentences) == 1, printed[-3000:]
    assert "'lots' is not a number of tokens" in sentences[0]


def test_disabled_means_that_nothing_of_ours_runs(model: Path, tmp_path: Path) -> None:
    """With ``KVCACHED_DISABLE=1`` there is no ledger, no limit and no line in the log, and no setting is even read."""
    environment = engine_environment(
        tmp_path / "ledger",
        "off",
        KVCACHED_DISABLE="1",
        KVCACHED_MAX_CACHED_TOKENS="lots",
    )
    with application(model, tmp_path / "log", environment, one_process=True) as running:
        assert [running.cached_tokens(1), running.cached_tokens(1)] == [0, HIT_TOKENS]
    assert not (tmp_path / "ledger").exists()
    assert "kvcached" not in (tmp_path / "log").read_text()


def test_a_vllm_that_lacks_a_target_serves_and_says_why(model: Path, tmp_path: Path) -> None:
    """With a hook target missing nothing is installed, the slot gives the reason, and waiting fails at once."""
    ledger_dir = tmp_path / "ledger"
    environment = engine_environment(ledger_dir, "odd", KVCACHED_MAX_CACHED_TOKENS="0")
    environment = with_plugin(environment, "shrunken_pool", tmp_path)
    with application(model, tmp_path / "log", environment) as running:
        assert [running.cached_tokens(1), running.cached_tokens(1)] == [0, HIT_TOKENS]
        (state,) = replicas("odd", ledger_dir)
        assert state["outcome"] == "unsupported_engine"
        assert "BlockPool has no 'evict_blocks'" in state["reason"]
        done = control("set", "0", "--instance", "odd", "--wait", "20", "--json", ledger_dir=ledger_dir)
        assert done.returncode == 7, done
        answer = json.loads(done.stdout)
        assert answer["waited_s"] < 1.0
        assert "BlockPool has no 'evict_blocks'" in answer["rejections"][0]["reason"]
    assert len(our_warnings((tmp_path / "log").read_text())) == 1


def test_strict_refuses_a_vllm_that_lacks_a_target(model: Path, tmp_path: Path) -> None:
    """With ``KVCACHED_STRICT=1`` such a vLLM does not start, and the last line says why."""
    environment = engine_environment(tmp_path / "ledger", "strict", KVCACHED_STRICT="1")
    printed = refused_start(model, tmp_path, with_plugin(environment, "shrunken_pool", tmp_path))
    assert "KVCACHED_STRICT=1" in printed.strip().splitlines()[-1]
    assert "BlockPool has no 'evict_blocks'" in printed.strip().splitlines()[-1]


def test_strict_refuses_before_the_server_says_that_it_is_ready(model: Path, tmp_path: Path) -> None:
    """With prefix caching off the start ends while the engine is being built: no server comes up and goes again."""
    environment = engine_environment(tmp_path / "ledger", "early", KVCACHED_STRICT="1")
    printed = refused_start(model, tmp_path, environment, "--no-enable-prefix-caching")
    assert "StartRefusedError: KVCACHED_STRICT=1, and this engine cannot be controlled: prefix caching" in printed
    assert "Application startup complete" not in printed


def test_an_engine_without_prefix_caching_says_that_there_is_nothing_to_control(model: Path, tmp_path: Path) -> None:
    """With prefix caching off the engine serves, and its slot says so."""
    environment = engine_environment(tmp_path / "ledger", "plain")
    with application(model, tmp_path / "log", environment, one_process=True, enable_prefix_caching=False) as running:
        assert [running.cached_tokens(1), running.cached_tokens(1)] == [0, 0]
        (state,) = wait_until(lambda: replicas("plain", tmp_path / "ledger"), 10.0)
        assert (state["outcome"], state["reason"]) == ("unsupported_engine", "prefix caching is switched off")


def test_registering_again_wraps_nothing_twice(tmp_path: Path) -> None:
    """Whatever the number of calls, each hook wraps the stock method once, and no ledger is touched."""
    program = """
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from kvcached.engines.vllm import register
stock = EngineCore.post_step, EngineCore.shutdown, EngineCoreProc._notify_idle_state_callbacks
for _ in range(3):
    register()
hooks = EngineCore.post_step, EngineCore.shutdown, EngineCoreProc._notify_idle_state_callbacks
print([hook.__wrapped__ is each for hook, each in zip(hooks, stock)])
"""
    environment = engine_environment(tmp_path / "ledger", "again")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.strip().splitlines()[-1:] == ["[True, True, True]"], done.stderr
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_fault_while_hooks_are_installed_is_not_the_plugin_loaders(tmp_path: Path, strict: str) -> None:
    """The loader would pass any exception on: it gets a refusal with the reason if that is wanted, else none."""
    program = """
from kvcached.engines.vllm import engine_core_hooks, register
from vllm.v1.engine.core import EngineCore
stock = EngineCore.post_step
del engine_core_hooks.check_pool_model
try:
    register()
finally:
    print(EngineCore.post_step is stock)
"""
    environment = engine_environment(tmp_path / "ledger", "stumbles", KVCACHED_STRICT=strict)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.strip().splitlines()[-1:] == ["True"], done.stderr
    assert done.returncode == int(strict)
    last = done.stderr.strip().splitlines()[-1:]
    refusal = "StartRefusedError: KVCACHED_STRICT=1, and this vLLM cannot be controlled: NameError"
    assert any(refusal in line for line in last) is (strict == "1")


def test_a_forked_engine_core_says_why_too(tmp_path: Path) -> None:
    """A core that is forked loads no plugins of its own; it says what its parent found out."""
    program = """
import multiprocessing, sys, time
from vllm.v1.core.block_pool import BlockPool
from kvcached.engines.vllm import register
del BlockPool.evict_blocks
register()
core = multiprocessing.get_context("fork").Process(name="EngineCore_DP1", target=time.sleep, args=(60,))
core.start()
print("forked", flush=True)
sys.stdin.readline()
core.kill()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=engine_environment(tmp_path / "ledger", "fork"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as parent:
        assert parent.stdout is not None
        assert any(line.strip() == "forked" for line in parent.stdout)
        (state,) = wait_until(lambda: replicas("fork", tmp_path / "ledger"), 10.0)
        assert (state["replica"], state["outcome"]) == (1, "unsupported_engine")
        assert "BlockPool has no 'evict_blocks'" in state["reason"]
        parent.communicate("\n", timeout=30)


def test_a_second_engine_of_the_same_name_waits_for_the_name(model: Path, tmp_path: Path) -> None:
    """The second serves under its startup limit and says so once; when the first is gone, it takes the name over."""
    ledger_dir = tmp_path / "ledger"
    environment = engine_environment(ledger_dir, "twin", KVCACHED_MAX_CACHED_TOKENS="100")
    with application(model, tmp_path / "first.log", environment, one_process=True) as first:
        running = application(model, tmp_path / "second.log", environment, one_process=True)
        with running as second:
            assert [second.cached_tokens(1), second.cached_tokens(1)] == [0, 96]
            set_limit(0, "twin", ledger_dir)
            assert second.cached_tokens(1) == 96
            first.end()
            wait_until(lambda: replicas("twin", ledger_dir), 10.0)
            set_limit(0, "twin", ledger_dir)
            assert second.cached_tokens(1) == 0
    assert our_warnings((tmp_path / "first.log").read_text()) == []
    (warning,) = our_warnings((tmp_path / "second.log").read_text())
    assert "twin" in warning
