"""Shell completion, in real interactive shells: commands, options and the names of live instances."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from support.commands import PATIENCE_S, run
from support.needs import need_program
from support.toys import identity

from kvcached.ledger.directory import LedgerDirectory
from kvcached.values import Update

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.commands import Control, Toys

SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        "source {folder}/_kvcached-control; bind 'set enable-bracketed-paste off'",
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        "fpath=({folder} $fpath); autoload -U compinit; compinit -u -D; unset zle_bracketed_paste",
    ),
}


PROGRAM = f'#!/bin/sh\nexec {sys.executable} -m kvcached.control "$@"\n'
HOSTILE = ("ch$(touch one)", "ch`touch two`", "ch;touch three", "ch\\\nx", "ch*", "ch at", "ch\x1b]0;owned\x07", "chät")
"""Names that no engine can register under, and that a peer may all the same write into a ledger."""


class Shell:
    """An interactive shell on a terminal of its own."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self.shown = ""

    def type(self, keys: str) -> None:
        """Type; what the shell shows from now on counts."""
        self.shown = ""
        os.write(self._terminal, keys.encode())

    def expect(self, text: str) -> None:
        """Wait until the shell shows ``text``."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            readable, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, self.shown
            self.shown += os.read(self._terminal, 65536).decode(errors="replace")


@contextmanager
def shell(name: str, folder: Path, text: str = PROGRAM) -> Iterator[Shell]:
    """Start a shell in ``folder`` that has the completion script loaded and the program of this text on its path."""
    need_program(name, name)
    command, setup = SHELLS[name]
    script = folder / "_kvcached-control"  # where zsh looks for it
    script.write_text(run([sys.executable, "-m", "kvcached.control", "completion", name]).stdout)
    program = folder / "kvcached-control"
    program.write_text(text)
    program.chmod(0o755)
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TERM": "dumb",
        "HOME": str(folder),
        "PS1": "",
    }
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True, cwd=folder
    )
    os.close(theirs)
    try:
        opened = Shell(ours)
        opened.type(f"{setup.format(folder=folder)}; stty cols 500; echo rea''dy\n")
        opened.expect("ready")
        yield opened
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)


@pytest.mark.parametrize("name", SHELLS)
def test_names_options_and_commands_are_completed(name: str, control: Control, toys: Toys, tmp_path: Path) -> None:
    """Tab completes a command, an option, and the name of the only live instance that fits."""
    toys.start("chat-of-the-north", "code")
    with shell(name, tmp_path) as opened:
        opened.type("kvcached-control stat\t")
        opened.expect("status")
        opened.type("--hist\t")
        opened.expect("--history")
        opened.type(f"--ledger-dir {control.directory} --instance ch\t")
        opened.expect("chat-of-the-north")
        opened.type("\x15kvcached-control set unl\t")
        opened.expect("unlimited")


def complete_and_look(opened: Shell, directory: Path) -> None:
    """Complete the only legal name that fits, which shows that the others were passed over, and count the files."""
    opened.type(f"kvcached-control status --ledger-dir {directory} --instance ch\t")
    opened.expect("chat-of-the-north")
    opened.type("\x15echo made:$(ls | grep -cE '^(one|two|three)'):\n")
    opened.expect("made:0:")


@pytest.mark.parametrize("name", SHELLS)
def test_names_of_a_hostile_peer_are_neither_completed_nor_run(name: str, ledger_dir: Path, tmp_path: Path) -> None:
    """Tab on a ledger that holds command substitutions for names runs none of them, and completes the legal name."""
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        directory.create("cpu-0")
        for number, instance in enumerate(["chat-of-the-north", *HOSTILE]):
            directory.open("cpu-0").handle.register(identity(instance), 0, 1, number + 1, [Update(0, 16000)])
        with shell(name, tmp_path) as opened:
            complete_and_look(opened, ledger_dir)
    assert not {"one", "two", "three"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", SHELLS)
def test_script_expands_nothing_whatever_it_is_told(name: str, tmp_path: Path) -> None:
    """Even a program that prints command substitutions for names gets none of them run or completed."""
    (tmp_path / "names").write_text("\n".join([*HOSTILE, "chat-of-the-north", ""]))
    with shell(name, tmp_path, f"#!/bin/sh\ncat {tmp_path}/names\n") as opened:
        complete_and_look(opened, tmp_path)
    assert not {"one", "two", "three"} & {path.name for path in tmp_path.iterdir()}


def test_names_one_a_line(control: Control, toys: Toys) -> None:
    """The names of live instances are printed sorted, one a line; none when none is alive."""
    engine = toys.start("code", "chat")
    assert control.run("completion", "names").stdout == "chat\ncode\n"
    engine.kill()
    engine.wait()
    assert control.run("completion", "names").stdout == ""


def test_missing_package_is_one_sentence(tmp_path: Path) -> None:
    """Without shtab there is one sentence that says what to install."""
    (tmp_path / "shtab.py").write_text("raise ImportError('not here')\n")
    result = run([sys.executable, "-m", "kvcached.control", "completion", "bash"], PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == ("kvcached-control: completion needs the package shtab (not here); pip install shtab\n")
