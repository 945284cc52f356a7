"""The rig as a user runs it: real ranks, a real ledger, publications from other processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.toys import identity

from kvcached.ledger.subscription import Subscription
from kvcached.values import Outcome

if TYPE_CHECKING:
    from conftest import Engines


UNLIMITED = {"KVCACHED_MAX_CACHED_TOKENS": "-1"}


def assert_ranks_agree(report: dict[str, Any]) -> None:
    """Fail unless all ranks did and held the same at every step, and kept to the limit after every enforcement."""
    first = report["ranks"][0]
    for rank in report["ranks"]:
        assert rank["digest"] == first["digest"]
        for key in ("step", "revision", "limit_tokens", "evicted_tokens", "idle_tokens_after", "complete"):
            assert [one[key] for one in rank["updates"]] == [one[key] for one in first["updates"]]
        assert rank["rejections"] == first["rejections"]
        assert rank["limit_breaches"] == 0
        assert (rank["steps"], rank["collectives"]) == (first["steps"], first["collectives"])
        for update in rank["updates"]:
            bound = max(update["limit_tokens"], report["block_tokens"] if update["limit_tokens"] else 0)
            assert update["limit_tokens"] == -1 or update["idle_tokens_after"] <= bound or not update["complete"]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that is dead but not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_never_differ_under_random_publications(engines: Engines) -> None:
    """Four ranks, stopped at random and given random limits at random, apply and hold the same at the same steps."""
    engine = engines.start("--tp", "4", "--requests", "300", "--capacity-tokens", "100000")
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    published = 0
    pids = engine.rank_pids()
    while engine.process.poll() is None:
        published += engine.publish(rng.choice((-1, 0, 7, 100, 20000, 80000)), wait=None).accepted
        late = rng.choice(pids)
        with contextlib.suppress(ProcessLookupError):  # the run may end meanwhile
            os.kill(late, signal.SIGSTOP)
            time.sleep(rng.random() * 0.05)
            os.kill(late, signal.SIGCONT)
        time.sleep(rng.random() * 0.05)
    report = engine.finish()
    assert_ranks_agree(report)
    assert report["requests"] == 300
    assert 3 <= len(report["ranks"][0]["updates"]) <= published
    revisions = [one["revision"] for one in report["ranks"][0]["updates"]]
    assert revisions == sorted(set(revisions))


def test_idle_engine_applies_and_drops_in_chunks(engines: Engines) -> None:
    """An engine with nothing to do takes a publication, works a big drop off step by step, and rests again."""
    timeline = engines.directory / "timeline.jsonl"
    options = ("--chunk-tokens", "4096", "--linger", "100", "--timeline", str(timeline))
    engine = engines.start("--tp", "2", "--requests", "300", *options)
    engine.publish(-1, wait=30.0)
    engine.wait_for(lambda: engine.status().replicas[0].active_tokens == 0, "end of the load")
    held = engine.status().replicas[0].idle_tokens
    assert engine.publish(1000).applied
    assert engine.status().replicas[0].idle_tokens <= 1000
    before = [cpu_seconds(pid) for pid in engine.rank_pids()]
    time.sleep(1)
    used = [after - once for after, once in zip(map(cpu_seconds, engine.rank_pids()), before, strict=True)]
    assert max(used) < 0.1, "nobody spins"
    report = engine.finish(interrupt=True)
    assert_ranks_agree(report)
    update = report["ranks"][1]["updates"][-1]
    assert (update["complete"], update["idle_tokens_after"]) == (True, 992)
    assert update["evicted_tokens"] == held - 992
    assert update["steps"] == -(-update["evicted_tokens"] // 4096)
    samples = [json.loads(line) for line in timeline.read_text().splitlines()]
    for rank in range(2):
        series = [
            one["idle_tokens"] for one in samples if one["rank"] == rank and one["revision"] == update["revision"]
        ]
        assert series[-1] == 992
        assert series == sorted(series, reverse=True)
        assert max(once - later for once, later in itertools.pairwise(series)) == 4096


def test_updates_cost_no_collective_and_no_ledger_on_other_ranks(engines: Engines) -> None:
    """An update rides the step's own broadcast, one collective each, and rank 0 alone has the ledger open."""
    engine = engines.start("--tp", "3", "--requests", "0", "--linger", "100")
    for limit in (100, 0, -1, 50):
        assert engine.publish(limit).applied
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in engine.rank_pids()]
    assert [".ledger" in text for text in maps] == [True, False, False]
    report = engine.finish(interrupt=True)
    assert_ranks_agree(report)
    assert report["ranks"][0]["steps"] == 5, "four updates and the end"
    assert report["ranks"][0]["collectives"] == 6, "the start and one for each step"


def test_ledger_removed_under_a_live_engine_comes_back(engines: Engines) -> None:
    """When all ledger files vanish the engine registers again by itself, keeps its limit, and takes publications."""
    engine = engines.start("--tp", "2", "--requests", "20", "--linger", "100")
    assert engine.publish(5000).applied
    for path in (engines.directory / "ledger").glob("*.ledger"):
        path.unlink()
    # A slot is seen before its first report is.
    engine.wait_for(
        lambda: any(one.replicas[0].applied.limit_tokens == 5000 for one in engine.statuses()),
        "new registration with the limit in force",
    )
    assert engine.publish(300).applied
    report = engine.finish(interrupt=True)
    assert_ranks_agree(report)
    assert [one["limit_tokens"] for one in report["ranks"][1]["updates"]] == [5000, 300]


def test_pipeline_stages_reject(engines: Engines) -> None:
    """With two stages every rank keeps its limit and reports why, and the engine serves on."""
    engine = engines.start("--pp", "2", "--tp", "2", "--requests", "200", "--linger", "100")
    result = engine.publish(500, wait=None)
    assert result.accepted
    result = engine.publish(600, wait=30.0)
    assert result.applied is False
    assert "pp_size" in result.rejections[0].reason
    assert result.waited_s is not None
    assert result.waited_s < 10
    report = engine.finish(interrupt=True)
    assert (report["tp_size"], report["pp_size"], len(report["ranks"])) == (2, 2, 4)
    assert_ranks_agree(report)
    for rank in report["ranks"]:
        assert rank["updates"] == []
        assert rank["final_limit_tokens"] == -1, "nothing was set at its start, so it keeps everything"
        assert rank["rejections"][-1]["revision"] == result.revision
        assert "pp_size is 2" in rank["rejections"][-1]["reason"]


def test_failed_eviction_is_reported_and_healed(engines: Engines) -> None:
    """An exception in eviction leaves the limit stored and the engine serving; the next update evicts."""
    engine = engines.start("--tp", "2", "--requests", "60", "--fault", "evict:1", "--linger", "100", **UNLIMITED)
    engine.wait_for(lambda: engine.status().replicas[0].idle_tokens > 5000, "idle tokens")
    engine.wait_for(lambda: engine.status().replicas[0].active_tokens == 0, "end of the load")
    engine.publish(0, wait=0.5)
    replica = engine.status().replicas[0]
    assert (replica.outcome, replica.applied.limit_tokens, replica.eviction_errors) == (Outcome.EVICTION_FAILED, 0, 1)
    assert replica.idle_tokens > 5000
    assert engine.publish(100).applied
    report = engine.finish(interrupt=True)
    assert_ranks_agree(report)
    assert [one["complete"] for one in report["ranks"][1]["updates"]] == [False, True]
    assert report["ranks"][1]["updates"][1]["idle_tokens_after"] == 96


def test_killed_rank_ends_the_run(engines: Engines) -> None:
    """When a rank is killed the others end too, the message names it, and the name is free again."""
    engine = engines.start("--tp", "3", "--requests", "10", "--linger", "100")
    pids = engine.rank_pids()
    os.kill(pids[1], signal.SIGKILL)
    _, errors = engine.process.communicate(timeout=30)
    assert engine.process.returncode == 1
    assert f"rank 1 (pid {pids[1]}) was killed by SIGKILL" in errors
    assert "Traceback" not in errors
    assert not [pid for pid in pids if is_alive(pid)]
    following = Subscription(identity("rig"), ["cpu-0"], str(engines.directory / "ledger"))
    following.start()
    assert following.registered
    following.close()


def test_ranks_die_with_their_launcher(engines: Engines) -> None:
    """Killing the launcher leaves neither a rank nor a temporary file behind."""
    temporary = engines.directory / "tmp"
    temporary.mkdir()
    engine = engines.start("--tp", "2", "--requests", "10", "--linger", "100", TMPDIR=str(temporary))
    pids = engine.rank_pids()
    assert len(pids) == 2
    engine.process.kill()
    deadline = time.monotonic() + 30
    while [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not list(temporary.iterdir())


def test_interrupt_ends_a_run_with_its_report(engines: Engines) -> None:
    """SIGINT in the middle of the load ends all ranks after the same step, with exit code 0 and a report."""
    engine = engines.start("--tp", "2", "--requests", "100000", "--speed", "1")
    engine.wait_for(lambda: engine.status().replicas[0].active_tokens > 0, "load")
    engine.process.send_signal(signal.SIGINT)
    report = engine.finish()
    assert report["requests"] < 100000
    assert_ranks_agree(report)


def test_second_engine_of_a_name_is_told_who_has_it(engines: Engines) -> None:
    """A name that a live engine has is refused with exit code 1, and the message says which process that is."""
    first = Subscription(identity("rig"), ["cpu-0"], str(engines.directory / "ledger"))
    first.start()
    second = engines.launch("--requests", "1")
    _, errors = second.communicate(timeout=60)
    first.close()
    assert second.returncode == 1
    (line,) = errors.splitlines()
    assert "'rig'" in line
    assert f"pid {os.getpid()}" in line


def test_engine_without_a_ledger_serves_and_gets_one_later(engines: Engines) -> None:
    """A ledger directory that cannot be used delays the ``ready`` line, not the load; repair brings control back."""
    ledger = engines.directory / "ledger"
    ledger.rmdir()
    ledger.write_text("in the way")
    process = engines.launch("--requests", "20", "--linger", "100")
    assert process.stdout is not None
    assert process.stderr is not None
    assert "cannot be changed" in process.stderr.readline()
    ledger.unlink()
    ledger.mkdir(mode=0o700)
    assert process.stdout.readline() == f"ready rig {ledger}\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


def test_disabled_control_serves_alone(engines: Engines) -> None:
    """With KVCACHED_DISABLE=1 the engine serves, registers nowhere and says so instead of ``ready``."""
    process = engines.launch("--requests", "20", KVCACHED_DISABLE="1")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "")
    assert "KVCACHED_DISABLE=1" in errors
    assert not list((engines.directory / "ledger").iterdir())


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        ((), {"KVCACHED_MAX_CACHED_TOKENS": "lots"}, "KVCACHED_MAX_CACHED_TOKENS='lots' is not a number of tokens"),
        (("--instance", "a/b"), {}, "instance name 'a/b' is invalid"),
        (("--trace", "/nowhere/trace.jsonl"), {}, "trace /nowhere/trace.jsonl cannot be read"),
        (("--report", "/nowhere/report.json"), {}, "cannot write /nowhere/report.json"),
        (("--capacity-tokens", "15"), {}, "less than one block"),
        (("--tp", "2"), {"KVCACHED_GPU_IDS": "a,b,c"}, "KVCACHED_GPU_IDS names 3 members for 2 ranks"),
        (("--tp", "0"), {}, "argument --tp"),
        (("--tp", "1_0"), {}, "argument --tp"),
        (("--tp", "100000"), {}, "--tp 100000 with --pp 1 is more than 128 processes"),
        (("--tp", "64", "--pp", "3"), {}, "is more than 128 processes"),
        (("--block-tokens", "16"), {}, "--block-tokens needs --trace"),
        (("--speed", "nan"), {}, "argument --speed"),
        ((), {"KVCACHED_GPU_IDS": "a,a"}, "KVCACHED_GPU_IDS names a more than once"),
        (("--fault", "disk"), {}, "argument --fault"),
        (("--trace", "t", "--requests", "3"), {}, "not allowed with"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: tuple[str, ...], environment: dict[str, str], sentence: str) -> None:
    """What cannot be run ends with exit code 2 and says what is wrong, before torch is loaded."""
    command = [sys.executable, "-X", "importtime", "-m", "kvcached.rig", *arguments]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert sentence in result.stderr.splitlines()[-1]
    assert "| torch" not in result.stderr
