"""Measures the way of a publication into the embedded engine, each figure as a ratio within one run.

``measure()`` is for a script that prints all of the project's figures; run alone, this prints its own.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist

from kvcached.ledger import binding
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.replicas import find_replicas
from kvcached.ledger.subscription import Subscription
from kvcached.rig.config import RigConfig
from kvcached.rig.intake import Message
from kvcached.rig.rank import Rank
from kvcached.rig.step_broadcast import Exchange
from kvcached.settings import Settings
from kvcached.values import Identity, Update

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

RANKS = 4
ROUNDS = 400
WARM_UP = 20
GAP_S = 0.004
"""Between two events, so that each meets sleeping processes, as it does in an idle engine."""

IDLE_S = 10.0
INSTANCE = "bench"


@dataclass(frozen=True)
class Figure:
    """A ratio of two durations of one run, and what is aimed at."""

    name: str
    value_us: list[float]
    base_us: list[float]
    aim: str

    @property
    def ratio(self) -> float:
        """Median over median."""
        return statistics.median(self.value_us) / statistics.median(self.base_us)

    def describe(self) -> str:
        """Return one line."""
        value, base = statistics.median(self.value_us), statistics.median(self.base_us)
        p99, base_p99 = _quantile(self.value_us, 0.99), _quantile(self.base_us, 0.99)
        return (
            f"{self.name}: {self.ratio:.2f} (aim {self.aim}; {value:.0f} µs ÷ {base:.0f} µs; "
            f"p99 {p99:.0f} µs, of the base {base_p99:.0f} µs)"
        )


@dataclass(frozen=True)
class IdleCpu:
    """CPU time of an idle rank 0 as a share of one core, with a subscription and without."""

    subscribed: float
    unsubscribed: float

    def describe(self) -> str:
        """Return one line."""
        more = self.subscribed - self.unsubscribed
        return (
            f"idle CPU of a subscribed rank 0 above an unsubscribed one: {more:.1%} (aim 0.0%; "
            f"{self.subscribed:.3%} - {self.unsubscribed:.3%})"
        )


def measure() -> list[Figure | IdleCpu]:
    """Measure everything; takes about half a minute. Forks, so call it from a process without threads."""
    return [*measure_updates(), measure_idle_cpu()]


def measure_updates(rounds: int = ROUNDS) -> list[Figure]:
    """Measure publications into an idle group beside bare wakes and broadcasts between the same processes."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="kvcached-bench-") as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(rank, folder, rounds, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        published, rung = _publish_all(pipes[0], folder, rounds)
        times = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()
    taken, woken, sent = times[0].taken, times[0].woken, times[0].sent
    applied = [max(one.applied[place] for one in times) for place in range(rounds)]
    received = [max(one.received[place] for one in times) for place in range(rounds)]
    wake = Figure(
        "publication to taken by the idle rank 0 ÷ bare futex wake",
        _span(published, taken),
        _span(rung, woken),
        "<= 10, p99 <= 1000 µs",
    )
    group = Figure(
        f"publication to applied on all {RANKS} ranks ÷ one object broadcast",
        _span(published, applied),
        _span(sent, received),
        "<= 2",
    )
    return [wake, group]


def measure_idle_cpu(seconds: float = IDLE_S) -> IdleCpu:
    """Let two engines idle at the same time, one of them without control, and compare their rank 0."""
    with tempfile.TemporaryDirectory(prefix="kvcached-bench-") as folder:
        engines = [_start_idle(folder, disable) for disable in ("0", "1")]
        try:
            ranks = [_first_child(engine.pid) for engine in engines]
            time.sleep(1.0)
            before = [_cpu_ns(pid) for pid in ranks]
            time.sleep(seconds)
            used = [(_cpu_ns(pid) - once) / 1e9 / seconds for pid, once in zip(ranks, before, strict=True)]
        finally:
            for engine in engines:
                engine.kill()
                engine.communicate()
    return IdleCpu(*used)


@dataclass
class Times:
    """Moments on the monotonic clock, in ns, one per round. Rank 0 alone has all of them."""

    taken: list[int]
    woken: list[int]
    sent: list[int]
    applied: list[int]
    received: list[int]


def _run_rank(rank: int, folder: str, rounds: int, pipe: Connection) -> None:
    """Be one rank: apply a publication, then receive an object, and so on."""
    torch.set_num_threads(1)
    worker = Rank(_config(folder), rank)
    subscription = _subscribe(folder) if rank == 0 else None
    exchange = Exchange(rank, RANKS, Path(folder) / "store")
    times = Times([], [], [], [], [])
    for _ in range(rounds):
        if subscription is not None:
            _lead_round(worker, subscription, exchange, pipe, times)
        else:
            worker.step(exchange.receive())
            times.applied.append(time.monotonic_ns())
            dist.broadcast_object_list([None], src=0)
        times.received.append(time.monotonic_ns())
    pipe.send(times)
    pipe.recv()
    if subscription is not None:
        subscription.close()


def _lead_round(worker: Rank, subscription: Subscription, exchange: Exchange, pipe: Connection, times: Times) -> None:
    """Take one publication in the order of the rig's own loop, one bare wake, and send one object."""
    pipe.send("resting")
    while (update := subscription.poll()) is None:
        subscription.wait(time.monotonic() + 60)
    taken = time.monotonic_ns()
    exchange.send(Message([update], taken))
    worker.step(Message([update], taken))
    times.applied.append(time.monotonic_ns())
    times.taken.append(taken)
    subscription.acknowledge(worker.policy.report())
    handle = subscription._settlement.registration._last  # type: ignore[union-attr]  # noqa: SLF001 - the bell itself
    seen = handle.bell(binding.ACKNOWLEDGED)
    pipe.send("asleep")
    while handle.bell(binding.ACKNOWLEDGED) == seen:
        handle.wait(binding.ACKNOWLEDGED, seen, time.monotonic() + 60)
    times.woken.append(time.monotonic_ns())
    time.sleep(GAP_S)
    times.sent.append(time.monotonic_ns())
    dist.broadcast_object_list([update], src=0)


def _publish_all(pipe: Connection, folder: str, rounds: int) -> tuple[list[int], list[int]]:
    """Publish once per round and ring the other bell once; return when each was begun."""
    published, rung = [], []
    members = None
    for revision in range(1, rounds + 1):
        pipe.recv()
        if members is None:  # the engine is registered from its first word on
            directory = LedgerDirectory(_ledger(folder), writable=True).__enter__()
            (replica,) = find_replicas(directory.open_all(), INSTANCE)
            members = replica.members
        time.sleep(GAP_S)
        update = Update(revision, 1000 + revision)
        published.append(time.monotonic_ns())
        for member in members:
            member.ledger.handle.raise_desired(member.index, member.slot.incarnation, update)
        for member in members:
            member.ledger.handle.ring(binding.PUBLISHED)
        pipe.recv()
        time.sleep(GAP_S)
        rung.append(time.monotonic_ns())
        members[-1].ledger.handle.ring(binding.ACKNOWLEDGED)
    return published, rung


def _config(folder: str) -> RigConfig:
    settings = Settings(INSTANCE, 16000, _ledger(folder), None, disabled=False, strict=False)
    return RigConfig(
        settings=settings,
        tp_size=RANKS,
        pp_size=1,
        block_tokens=16,
        capacity_tokens=16000,
        token_bytes=4,
        longest_tokens=16000,
        chunk_tokens=65536,
        step_tokens=16384,
        speed=None,
        linger_s=0.0,
        check=False,
        timeline=False,
        fault_evictions=0,
        guards_returned=False,
    )


def _subscribe(folder: str) -> Subscription:
    config = _config(folder)
    identity = Identity(INSTANCE, "rig", "", 0, RANKS, 1, config.settings.startup_limit_tokens, config.block_tokens)
    subscription = Subscription(identity, config.gpu_ids, _ledger(folder))
    subscription.start()
    return subscription


def _ledger(folder: str) -> str:
    return f"{folder}/ledger"


def _start_idle(folder: str, disable: str) -> subprocess.Popen[str]:
    """Start a one-rank engine without load and return it once it idles."""
    command = [sys.executable, "-m", "kvcached.rig", "--requests", "0", "--linger", "3600"]
    command += ["--instance", "idle", "--ledger-dir", f"{folder}/idle-{disable}"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "KVCACHED_DISABLE": disable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.stdout is None or not process.stdout.readline():
        message = "the engine did not start"
        raise SystemExit(message)
    return process


def _first_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()[0])


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process; finer than the clock ticks in ``stat``."""
    return sum(
        int(path.read_text(encoding="ascii").split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def _span(begin: Sequence[int], end: Sequence[int]) -> list[float]:
    return [(one - other) / 1000 for one, other in zip(end, begin, strict=True)][WARM_UP:]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    for one in measure():
        print(one.describe())
