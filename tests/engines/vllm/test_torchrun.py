"""Engines that an external launcher starts, one per rank: each has its own scheduler, and all must decide alike."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from vllm_models import PLAIN, write_weights
from vllm_serving import ENGINE_OPTIONS, HIT_TOKENS, SUPPORT, control, engine_environment, replicas, wait_until

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_WITHIN_S = 300.0


def ask(directory: Path, number: int, seed: str) -> list[Any]:
    """Let all ranks serve a prompt; return what each of them answers."""
    draft = directory / "ask-draft"
    draft.write_text(seed)
    draft.rename(directory / f"ask-{number}")
    paths = [directory / f"answer-{number}-{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in paths), ANSWER_WITHIN_S)
    return [json.loads(path.read_text()) for path in paths]


def test_ranks_that_torchrun_started_are_left_alone_and_say_so(tmp_path: Path) -> None:
    """Neither a startup limit nor a publication changes one rank without the others: all go on hitting alike."""
    model = write_weights(PLAIN, tmp_path / "model")
    ledger_dir = tmp_path / "ledger"
    environment = engine_environment(
        ledger_dir, "torchrun", KVCACHED_MAX_CACHED_TOKENS="100", VLLM_CPU_OMP_THREADS_BIND="0|1"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SUPPORT / "torchrun_rank.py"), str(model), json.dumps(ENGINE_OPTIONS), str(tmp_path)]
    log = tmp_path / "log"
    with log.open("wb") as sink:
        launcher = subprocess.Popen(
            command, env=environment, stdout=sink, stderr=subprocess.STDOUT, cwd=tmp_path, start_new_session=True
        )
    try:
        first, again = ask(tmp_path, 0, "1"), ask(tmp_path, 1, "1")
        assert [cached for cached, _ in first + again] == [0, 0, HIT_TOKENS, HIT_TOKENS]
        states = wait_until(lambda: len(found := replicas("torchrun", ledger_dir)) == 2 and found, 10.0)
        assert {state["outcome"] for state in states} == {"unsupported_engine"}
        assert all("external launcher (torchrun)" in state["reason"] for state in states)
        done = control("set", "0", "--instance", "torchrun", "--wait", "20", ledger_dir=ledger_dir)
        assert done.returncode == 7, done
        last = ask(tmp_path, 2, "1")
        assert [cached for cached, _ in last] == [HIT_TOKENS, HIT_TOKENS]
        assert len({tuple(tokens) for _, tokens in [*first, *again, *last]}) == 1
        (tmp_path / "ask-3").touch()
        launcher.wait(60)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    warnings = [
        line for line in log.read_text(errors="replace").splitlines() if "kvcached" in line and "WARNING" in line
    ]
    assert len(warnings) == 2
