"""Measures the core's timing goals, each as a ratio of two medians of this one run. Started by scripts/bench."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.ledger.publication import publish
from kvcached.ledger.subscription import Subscription
from kvcached.values import Identity

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
ROUNDS = 15
WITH_BYTECODE = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
IDENTITY = Identity("bench", "bench", "1", 0, tp_size=1, pp_size=1, startup_limit_tokens=16000, block_tokens=16)


class Nothing:
    """Has a method that does nothing: what a call costs at least."""

    def method(self) -> None:
        """Do nothing."""


def subscribe(directory: str, members: int) -> Subscription:
    """Register an engine with ``members`` members."""
    subscription = Subscription(IDENTITY, [f"cpu-{index}" for index in range(members)], directory)
    subscription.start()
    return subscription


def show(name: str, value: float, base: float, unit: str, aim: str) -> None:
    """Print one ratio."""
    print(f"{name}: {value / base:.2f} (aim {aim}; {value:.1f} {unit} ÷ {base:.1f} {unit})", flush=True)


def bench_poll() -> None:
    """Measure poll() with nothing new against a method that does nothing, at three numbers of members."""
    for members in (1, 8, 64):
        with tempfile.TemporaryDirectory() as directory:
            subscription = subscribe(directory, members)
            nothing = Nothing()
            polls, nothings = [], []
            for _ in range(ROUNDS):
                scope = {"poll": subscription.poll, "method": nothing.method, "s": subscription, "n": nothing}
                polls.append(timeit.timeit("s.poll()", globals=scope, number=200_000) / 200_000 * 1e9)
                nothings.append(timeit.timeit("n.method()", globals=scope, number=200_000) / 200_000 * 1e9)
            subscription.close()
        name = f"poll() with nothing new ÷ a method that does nothing, {members} member(s)"
        show(name, statistics.median(polls), statistics.median(nothings), "ns", "<= 1.5, flat")


def bench_start() -> None:
    """Measure a whole run of `set` against an interpreter that only imports what it could not do without."""
    with tempfile.TemporaryDirectory() as directory:
        subscription = subscribe(directory, 2)
        command = [
            sys.executable,
            "-m",
            "kvcached.control",
            "set",
            "16k",
            "--instance",
            "bench",
            "--ledger-dir",
            directory,
        ]
        base = [sys.executable, "-c", "import argparse, json, dataclasses"]
        for one in (command, base):  # compiles to bytecode what no one has imported before, as an installation does
            run_once(one)
        both = [(run_once(command), run_once(base)) for _ in range(3 * ROUNDS)]
        subscription.close()
    value, against = (statistics.median(times) for times in zip(*both, strict=True))
    show("`set` ÷ `python -c 'import argparse, json, dataclasses'`", value, against, "ms", "<= 1.5")


def bench_status() -> None:
    """Measure `status` on 64 GPUs with 16 instances each against an interpreter that does nothing."""
    gpus = [f"GPU-{index:02}" for index in range(64)]
    with tempfile.TemporaryDirectory() as directory:
        subscriptions = [
            Subscription(replace(IDENTITY, instance_name=f"model-{index}", tp_size=64), gpus, directory)
            for index in range(16)
        ]
        for subscription in subscriptions:
            subscription.start()
        command = [sys.executable, "-m", "kvcached.control", "status", "--ledger-dir", directory]
        base = [sys.executable, "-c", "pass"]
        run_once(command)
        both = [(run_once(command), run_once(base)) for _ in range(ROUNDS)]
        for subscription in subscriptions:
            subscription.close()
    value, against = (statistics.median(times) for times in zip(*both, strict=True))
    print(
        f"`status` of 64 GPUs with 16 instances - `python -c pass`: {value - against:.0f} ms (aim < 100; "
        f"{value:.0f} ms - {against:.0f} ms)",
        flush=True,
    )


def run_once(command: list[str]) -> float:
    """Run a command and return how many milliseconds it took."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=WITH_BYTECODE)
    return (time.perf_counter() - started) * 1e3


def bench_publish() -> None:
    """Measure a publication to 8 members against the same in C."""
    members, rounds = 8, 300
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bench_publish"
        sources = sorted(str(path) for path in (ROOT / "native").glob("*.c"))
        command = ["cc", "-std=c11", "-O2", "-pthread", f"-I{ROOT / 'native'}", "-o", str(program)]
        subprocess.run([*command, str(ROOT / "scripts/benchmarks/publish.c"), *sources], check=True)
        directory = str(Path(folder) / "ledgers")
        subscription = subscribe(directory, members)
        in_python = [measure(lambda: publish(5, "bench", directory)) for _ in range(rounds)]
        run = subprocess.run(
            [program, directory, str(members), str(rounds)], check=True, capture_output=True, text=True
        )
        subscription.close()
    in_c = [int(line) / 1e3 for line in run.stdout.split()]
    show(
        f"publish to {members} members ÷ the same in C",
        statistics.median(in_python),
        statistics.median(in_c),
        "µs",
        "<= 10",
    )


def measure(function: Callable[[], object]) -> float:
    """Call once; the microseconds."""
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e6


def bench_size() -> None:
    """Show the size of a ledger file."""
    with tempfile.TemporaryDirectory() as directory:
        subscribe(directory, 1).close()
        size = (Path(directory) / "cpu-0.ledger").stat().st_size
    print(f"a ledger file: {size} bytes (aim <= 32768)", flush=True)


def bench_rig() -> None:
    """Measure the way of a publication into the embedded engine."""
    from embedded_engine import measure as measure_rig  # noqa: PLC0415 - imports torch

    for figure in measure_rig():
        print(figure.describe(), flush=True)


BENCHES = {
    "poll": bench_poll,
    "start": bench_start,
    "status": bench_status,
    "publish": bench_publish,
    "size": bench_size,
    "rig": bench_rig,
}


def main() -> None:
    """Run what was named, or everything."""
    for name in sys.argv[1:] or BENCHES:
        BENCHES[name]()


if __name__ == "__main__":
    main()
