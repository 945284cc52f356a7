"""Hazards of a thousand starts and ends: nothing may be left of an engine but its files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING

from support.toys import poll_now

from kvcached.ledger.instances import get_instances
from kvcached.ledger.publication import publish
from kvcached.ledger.subscription import Subscription
from kvcached.values import Identity, Outcome, Report, Update

if TYPE_CHECKING:
    from pathlib import Path

CYCLES = int(os.environ.get("KVCACHED_TEST_CYCLES", "60"))
"""How often; set it for a long run."""

GPUS = ("cpu-0", "cpu-1")
REPORT = Report(Update(0, 16000), 0, Outcome.STARTUP, "", 1, 2, 3, 4, 5)


def ledger_mappings(directory: Path) -> int:
    """Return how many mappings this process has of files in a directory."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum(str(directory) in line for line in file)


def run_once(directory: Path) -> None:
    """Start an engine, publish to it, let it apply, and end it."""
    subscription = Subscription(Identity("engine", "toy", "1", 0, 2, 1, 16000, 16), GPUS, str(directory))
    subscription.start()
    subscription.acknowledge(REPORT)
    assert publish(64, "engine", str(directory)).accepted
    assert poll_now(subscription) == Update(1, 64)
    subscription.close()


def test_engines_and_publications_leave_nothing_behind(tmp_path: Path) -> None:
    """After many engines started, were published to and ended, no descriptor, mapping, thread or slot is left."""
    directory = tmp_path / "ledgers"
    directory.mkdir(mode=0o700)
    run_once(directory)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(CYCLES):
        run_once(directory)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert ledger_mappings(directory) == 0
    assert get_instances(directory) == ()
    assert sorted(os.listdir(directory)) == ["cpu-0.ledger", "cpu-1.ledger"]


def hold(directory: Path, name: str, ready: int) -> None:
    """Register and wait for the end."""
    subscription = Subscription(Identity(name, "toy", "1", 0, 2, 1, 16000, 16), GPUS, str(directory))
    subscription.start()
    os.write(ready, b"+" if subscription.registered else b"-")
    signal.pause()


def start_and_kill(directory: Path, names: list[str]) -> None:
    """Start an engine of each name, see them all, kill them, and see none."""
    reading, writing = os.pipe()
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=hold, args=(directory, name, writing)) for name in names]
    for child in children:
        child.start()
    answers = b""
    while len(answers) < len(children):
        answers += os.read(reading, len(children))
    assert answers == b"+" * len(children)
    assert [instance.name for instance in get_instances(directory)] == names
    for child in children:
        child.kill()
        child.join()
    os.close(reading)
    os.close(writing)


def test_ten_instances_killed_again_and_again_leave_nothing_behind(tmp_path: Path) -> None:
    """Ten instances are killed and started again under their names at once, every time, and the table never fills."""
    directory = tmp_path / "ledgers"
    directory.mkdir(mode=0o700)
    names = [f"instance-{index}" for index in range(10)]
    for _ in range(max(8, CYCLES // 15)):  # eight times ten is more than the table holds
        start_and_kill(directory, names)
        assert get_instances(directory) == ()
    assert sorted(os.listdir(directory)) == ["cpu-0.ledger", "cpu-1.ledger"]
