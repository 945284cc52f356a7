"""Damage to the ledgers of a live engine of four ranks, between publications: it sets no limit of its own."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.toys import identity

from kvcached.ledger.publication import publish
from kvcached.ledger.subscription import Subscription

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Engine, Engines

BACK_WITHIN_S = 2.0
"""What is promised; asserted with more, because a loaded machine may not run the engine for a while."""
PATIENCE_S = 20.0
ROUNDS = int(os.environ.get("KVCACHED_TEST_DAMAGES", "1"))
"""How often each damage is done; set it for a long run."""
GPUS = [f"cpu-{index}" for index in range(4)]


def other_ledger(tmp_path: Path) -> Path:
    """Return a ledger of another directory, with a dead engine that was told to keep nothing."""
    directory = tmp_path / "other"
    directory.mkdir(mode=0o700)
    engine = Subscription(identity("beta"), ["cpu-0"], str(directory))
    engine.start()
    for _ in range(40):
        publish(0, "beta", str(directory))
    engine.close()
    return directory / "cpu-0.ledger"


def copy_over(path: Path, source: Path) -> None:
    subprocess.run(["cp", str(source), str(path)], check=True)


def put_back(path: Path, source: Path) -> None:
    command = ["dd", f"if={source}", f"of={path}", "conv=notrunc", "status=none"]
    subprocess.run(command, check=True)


def cut(path: Path, _source: Path) -> None:
    os.truncate(path, random.choice([0, 4095, 4096, 20000]))


def punch(path: Path, _source: Path) -> None:
    command = ["fallocate", "--punch-hole", "--offset", "0", "--length", str(path.stat().st_size), str(path)]
    subprocess.run(command, check=True)


def remove(path: Path, _source: Path) -> None:
    path.unlink()


def move_over(path: Path, source: Path) -> None:
    shutil.copy(source, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "cp": copy_over,
    "dd conv=notrunc": put_back,
    "truncate": cut,
    "punched hole": punch,
    "rm": remove,
    "mv": move_over,
}


def come_back(engine: Engine, published: dict[int, set[int]], limit: int) -> float:
    """Publish until a publication is applied by all members again; the seconds that took."""
    started = time.monotonic()
    while True:
        result = engine.publish(limit, wait=0.5)
        published.setdefault(result.revision, set()).add(limit)
        if result.applied:
            return time.monotonic() - started
        assert time.monotonic() - started < PATIENCE_S, result.warnings
        limit += 1


def hurt(damage: str, path: Path, tmp_path: Path, foreign: Path, old: bytes) -> None:
    """Do a damage to a ledger, with another directory's ledger or with an old copy of its own."""
    source = foreign
    if damage == "dd conv=notrunc":
        source = tmp_path / "old"
        source.write_bytes(old)
    DAMAGES[damage](path, source)


def test_damaged_ledgers_set_no_limit_and_control_comes_back(engines: Engines, tmp_path: Path) -> None:
    """Whatever is done to a ledger between publications, ranks apply what was published to them, equally, and go on."""
    seed = random.SystemRandom().randrange(2**32)
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    engine = engines.start("--tp", "4", "--requests", "0", "--linger", "600", KVCACHED_MAX_CACHED_TOKENS="16000")
    ledgers = [tmp_path / "ledger" / f"{gpu}.ledger" for gpu in GPUS]
    foreign = other_ledger(tmp_path)
    published: dict[int, set[int]] = {}
    in_force = 16000
    for turn, damage in enumerate(rng.sample([*DAMAGES] * ROUNDS, ROUNDS * len(DAMAGES))):
        limit = 1000 * (turn + 1)
        member = rng.randrange(4)
        old = ledgers[member].read_bytes()
        result = engine.publish(limit)
        assert result.applied
        published.setdefault(result.revision, set()).add(limit)
        hurt(damage, ledgers[member], tmp_path, foreign, old)
        took_s = come_back(engine, published, limit + 10)
        sys.stdout.write(f"{damage}: control back within {took_s:.2f} s (promised: {BACK_WITHIN_S:.0f} s)\n")
        in_force = engine.status().replicas[0].applied.limit_tokens
    check_ranks(engine.finish(interrupt=True), {16000}.union(*published.values()), in_force)


def check_ranks(report: dict[str, Any], known: set[int], in_force: int) -> None:
    """Check that all ranks did the same, applied nothing but known limits, and end with the one that was in force."""
    first = report["ranks"][0]
    for rank in report["ranks"]:
        assert rank["digest"] == first["digest"]
        for key in ("step", "revision", "limit_tokens", "evicted_tokens"):
            assert [one[key] for one in rank["updates"]] == [one[key] for one in first["updates"]]
    revisions = [update["revision"] for update in first["updates"]]
    assert revisions == sorted(set(revisions))
    assert all(update["limit_tokens"] in known for update in first["updates"])
    assert first["final_limit_tokens"] == in_force


def caught_signals(pid: int) -> int:
    """Return which signals a process has handlers for, as a mask."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)


def test_engine_handles_the_same_signals_whatever_happens_to_its_ledger(engines: Engines, tmp_path: Path) -> None:
    """Publications and a lost ledger change no rank's signal handlers, and nobody handles SIGBUS."""
    engine = engines.start("--tp", "2", "--requests", "0", "--linger", "600")
    before = [caught_signals(pid) for pid in engine.rank_pids()]
    assert [mask >> (signal.SIGBUS - 1) & 1 for mask in before] == [0, 0]
    assert engine.publish(100).applied
    os.truncate(tmp_path / "ledger" / "cpu-0.ledger", 0)
    come_back(engine, {}, 200)
    assert [caught_signals(pid) for pid in engine.rank_pids()] == before
