"""The supervisor on real engines with real traffic: it moves, it survives its own death, and hands win."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.commands import PATIENCE_S, wait_for

from kvcached.ledger.publication import publish
from kvcached.ledger.snapshot import take_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.commands import Control

BUDGET = 60_000
CAPACITY = 60_000
BALANCE = ("balance", "--instances", "busy,quiet", "--budget", str(BUDGET), "--period", "0.5", "--json")


@pytest.fixture
def rigs(ledger_dir: Path) -> Iterator[None]:
    """Run two engines, of which one gets chats without end and one nothing after its first prompt."""
    shared = [sys.executable, "-m", "kvcached.rig", "--ledger-dir", str(ledger_dir), "--capacity-tokens", str(CAPACITY)]
    loads = {
        "busy": ("--requests", "1000000", "--seed", "1", "--speed", "3"),
        "quiet": ("--requests", "1", "--linger", "3600"),
    }
    with contextlib.ExitStack() as stack:
        for name, load in loads.items():
            process = stack.enter_context(
                subprocess.Popen([*shared, "--instance", name, *load], stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline().startswith(f"ready {name} ")
        yield


@contextlib.contextmanager
def supervisor(control: Control) -> Iterator[subprocess.Popen[str]]:
    """Run a supervisor until the block ends, and drop what it prints."""
    with subprocess.Popen(
        control.command(*BALANCE), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as one:
        try:
            yield one
        finally:
            one.terminate()
            _, errors = one.communicate(timeout=PATIENCE_S)
            assert "Traceback" not in errors, errors


def limits(ledger_dir: Path) -> dict[str, int]:
    """Return what each engine is told to keep, or has in force if that is more."""
    found = {}
    for replica in take_snapshot(str(ledger_dir)).replicas:
        told, used = replica.slot.desired.limit_tokens, replica.slot.report.applied.limit_tokens
        held = max(CAPACITY if limit < 0 else min(limit, CAPACITY) for limit in (told, used))
        found[replica.slot.identity.instance_name] = max(held, replica.slot.report.idle_tokens)
    return found


class Reader(threading.Thread):
    """Looks at the ledger all the time, and knows nothing of the supervisor but the budget."""

    def __init__(self, ledger_dir: Path) -> None:
        super().__init__(daemon=True)
        self._ledger_dir = ledger_dir
        self.stop = threading.Event()
        self.looks = 0
        self.largest = 0

    def run(self) -> None:
        """Look until told to stop."""
        while not self.stop.wait(0.005):
            self.looks += 1
            self.largest = max(self.largest, sum(limits(self._ledger_dir).values()))


def said(control: Control) -> dict[str, Any]:
    """Return the state of the last decision."""
    try:
        return dict(json.loads((control.directory / "balance.default.json").read_text()))
    except FileNotFoundError:
        return {}


def state(control: Control) -> dict[str, Any]:
    """Return each instance's entry in it."""
    return {entry["name"]: entry for entry in said(control).get("instances", [])}


@pytest.mark.usefixtures("rigs")
def test_share_moves_to_the_busy_engine_and_never_above_the_budget(control: Control, ledger_dir: Path) -> None:
    """The busy engine gets most of the budget though its supervisor is killed again and again on the way."""
    with supervisor(control):
        wait_for(lambda: sum(limits(ledger_dir).values()) <= BUDGET, "a first division")
    reader = Reader(ledger_dir)
    reader.start()
    for _ in range(3):
        before = said(control).get("time")
        with supervisor(control) as running:
            wait_for(lambda before=before: said(control).get("time") != before, "a decision")  # type: ignore[misc]
            running.kill()
    with supervisor(control) as running:
        wait_for(lambda: limits(ledger_dir)["busy"] > BUDGET * 0.7, "a larger share of the busy engine")
        second = control.run(*BALANCE)
        assert (second.returncode, f"held by pid {running.pid} " in second.stderr) == (5, True)
    assert running.returncode == 0
    reader.stop.set()
    reader.join()
    print(f"{reader.looks} looks, at most {reader.largest} of {BUDGET}")
    assert reader.looks > 100
    assert reader.largest <= BUDGET
    assert limits(ledger_dir)["quiet"] < BUDGET * 0.3
    assert any(
        note["note"].startswith("balance default: to busy") for note in control.json("status", "--history")["history"]
    )


@pytest.mark.usefixtures("rigs")
def test_what_is_set_by_hand_stays_until_it_is_taken(control: Control, ledger_dir: Path) -> None:
    """A limit that somebody set is left alone, also by the next supervisor, until it is given back."""
    with supervisor(control):
        wait_for(lambda: state(control).get("busy", {}).get("state") == "balanced", "a curve of the busy engine")
        assert publish(9_000, "busy", str(ledger_dir), note="night shift").accepted
        wait_for(lambda: state(control)["busy"]["state"] == "by hand", "a pinned engine")
    assert f"of uid {os.getuid()}, 'night shift'" in state(control)["busy"]["reason"]
    (control.directory / "balance.default.json").unlink()
    with supervisor(control):
        wait_for(lambda: state(control).get("busy", {}).get("state") == "by hand", "a pinned engine")
        time.sleep(1.0)
        assert limits(ledger_dir)["busy"] == 9_000
        assert control.run("balance", "--take", "busy").returncode == 0
        wait_for(lambda: limits(ledger_dir)["busy"] > 30_000, "a larger share of the busy engine")
