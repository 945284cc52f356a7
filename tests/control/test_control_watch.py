"""``watch`` is woken by what happens, tells each change once, and leaves the terminal as it was."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.commands import PATIENCE_S, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.commands import Control, Toys

LONG_S = "3600"
"""An interval that no test waits for."""


@contextmanager
def watching(control: Control, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``watch`` with its output in a pipe, for so long at most that a test which waits in vain fails."""
    process = subprocess.Popen(
        control.command("watch", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = threading.Timer(3 * PATIENCE_S, process.kill)
    end.start()
    try:
        yield process
    finally:
        end.cancel()
        process.kill()
        process.communicate()


def next_change(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line of ``watch --json``."""
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def test_change_is_told_at_once(control: Control, toys: Toys) -> None:
    """With an interval of an hour, a publication and its application are told within moments: the doorbell woke it."""
    toys.start("chat", gpus="GPU-0,GPU-1")
    with watching(control, "--json", "--interval", LONG_S) as process:
        assert next_change(process)["replicas"][0]["applied"]["revision"] == 0
        started = time.monotonic()
        control.run("set", "1k", "--instance", "chat")
        while next_change(process)["replicas"][0]["applied"] != {"revision": 1, "limit_tokens": 1000}:
            pass
        assert time.monotonic() - started < PATIENCE_S


def test_nothing_is_told_twice(control: Control, toys: Toys) -> None:
    """While nothing changes there is nothing to read, however often it looks."""
    toys.start("chat", step_s=LONG_S)
    with watching(control, "--json", "--interval", "0.1") as process:
        first = next_change(process)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=PATIENCE_S)
    assert first["name"] == "chat"
    assert (rest, errors, process.returncode) == ("", "", 0)


def test_engines_come_and_go(control: Control, toys: Toys) -> None:
    """An engine that starts later on a GPU of its own is told, and so is the end of one that is killed."""
    toys.start("chat")
    with watching(control, "--json", "--interval", "0.2") as process:
        assert next_change(process)["name"] == "chat"
        other = toys.start("code", gpus="GPU-7")
        assert next_change(process)["name"] == "code"
        other.kill()
        while not (change := next_change(process)).get("ended"):
            pass
        assert change["name"] == "code"


@contextmanager
def ringing(directory: Path) -> Iterator[None]:
    """Ring the bells of the ledgers that are there now, as a serving engine does with each report, until the end."""
    code = (
        "import sys, time; from kvcached.ledger.directory import LedgerDirectory\n"
        "with LedgerDirectory(sys.argv[1], writable=True) as directory:\n"
        "    ledgers = directory.open_all(); print(flush=True)\n"
        "    while True:\n"
        "        time.sleep(0.02)\n"
        "        for ledger in ledgers: ledger.handle.ring(1)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def test_engines_are_found_while_bells_ring_all_the_time(control: Control, toys: Toys) -> None:
    """Beside a busy engine, one that starts on another GPU is told, and so is one that registers again."""
    toys.start("chat")
    with watching(control, "--json", "--interval", "1") as process:
        assert next_change(process)["name"] == "chat"
        with ringing(control.directory):
            toys.start("code", gpus="GPU-7")
            assert next_change(process)["name"] == "code"
            ledger = control.directory / "GPU-7.ledger"
            before = ledger.stat().st_ino
            ledger.unlink()
            wait_for(lambda: ledger.exists() and ledger.stat().st_ino != before, "new ledger")
            wait_for(lambda: control.run("set", "1k", "--instance", "code").returncode == 0, "registration")
            while next_change(process).get("replicas", [{}])[0].get("applied") != {"revision": 1, "limit_tokens": 1000}:
                pass


def test_mistyped_instance_is_told(control: Control, toys: Toys) -> None:
    """A user who watches a missing instance is told so, with the live names, and sees it when it starts."""
    toys.start("chat")
    with watching(control, "--json", "--instance", "chta", "--interval", "0.1") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == f"kvcached-control: no live instance 'chta' in {control.directory}; live there: chat\n"
        toys.start("chta", gpus="GPU-1")
        assert next_change(process)["name"] == "chta"


def test_dumb_terminal_gets_plain_boards(control: Control, toys: Toys) -> None:
    """A terminal that cannot move its cursor gets one board after the other."""
    toys.start("chat", step_s=LONG_S)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        control.command("watch"), stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"}
    )
    os.close(theirs)
    text = bytearray()

    def drawn() -> bool:
        text.extend(os.read(ours, 65536))
        return b"100,000" in text

    wait_for(drawn, "board")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE_S) == 0
    os.close(ours)
    assert b"\033" not in text


def test_lost_directory_is_waited_for(control: Control, toys: Toys) -> None:
    """When the directory goes and comes back, watching goes on."""
    engine = toys.start("chat", step_s=0.05)
    away = control.directory.with_name("away")
    engine.send_signal(signal.SIGSTOP)  # it would make the directory again, maybe before it was missed
    with watching(control, "--json", "--interval", "0.1") as process:
        next_change(process)
        control.directory.rename(away)
        while not next_change(process).get("ended"):
            pass
        away.rename(control.directory)
        assert next_change(process)["name"] == "chat"


def test_pipe_gets_a_board_per_change(control: Control, toys: Toys) -> None:
    """Without a terminal each change is a board of plain text."""
    toys.start("chat")
    with watching(control, "--interval", LONG_S) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert next(lines).startswith("INSTANCE")
        control.run("set", "1k", "--instance", "chat")
        assert any("r1 1,000" in line and "applied" in line for line in lines)


def test_closed_pipe_ends_it_quietly(control: Control, toys: Toys) -> None:
    """A reader that goes away ends it without a word."""
    toys.start("chat")
    with watching(control, "--json", "--interval", "0.1") as process:
        next_change(process)
        assert process.stdout is not None
        process.stdout.close()
        control.run("set", "1k", "--instance", "chat")
        assert process.wait(timeout=PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        process.stdout = None


def test_terminal_is_left_as_it_was(control: Control, toys: Toys) -> None:
    """On a terminal it draws on a screen of its own, and Ctrl-C brings back the earlier content, and the last table."""
    toys.start("chat")
    for ending in (signal.SIGINT, signal.SIGTERM):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            control.command("watch"), stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        )
        os.close(theirs)
        text = bytearray()

        def drawn(text: bytearray = text, ours: int = ours) -> bool:
            text += os.read(ours, 65536)
            return b"100,000" in text and b"idle" in text

        wait_for(drawn, "board")
        process.send_signal(ending)
        try:
            while chunk := os.read(ours, 65536):
                text += chunk
        except OSError:  # the terminal ends with its last user
            pass
        os.close(ours)
        assert process.wait(timeout=PATIENCE_S) == 0
        assert text.startswith(b"\033[?1049h\033[?25l")
        after = text.partition(b"\033[?25h\033[?1049l")[2]
        assert b"chat" in after
        assert b"Traceback" not in text


def test_missing_directory(control: Control) -> None:
    """Without a directory there is nothing to watch."""
    control.directory.rmdir()
    result = control.run("watch")
    assert (result.returncode, len(result.stderr.splitlines())) == (3, 1)
    assert str(control.directory) in result.stderr


def test_bad_intervals(control: Control) -> None:
    """An interval that is no time to sleep is a usage error."""
    for text in ("0", "-1", "nan", "inf", "soon", "0.01"):
        result = control.run("watch", "--interval", text)
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
