"""Hazards of names and texts that others wrote: through every command, in every encoding, nothing steers a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import unicodedata
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from support.commands import PATIENCE_S, Control, Toys, wait_for
from support.toys import identity

from kvcached.ledger.contents import AuditRecord
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.publication import publish
from kvcached.printable_text import printable
from kvcached.values import Outcome, Report, Update

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENCODINGS = ("utf-8", "iso-8859-1", "ascii", "koi8-r")
TEXTS = (
    "\x1b]0;owned\x07",
    "\x1b[31mred",
    "a\nkvcached-control: forged",
    "\r\x08over",
    "\x9b31m",
    "left\u202eright\u2066",
    "line\u2028next\u2029",
    "$(touch pwned)`touch pwned`;touch pwned",
    "наблюдатель",
    "猫のモデル",
    "نموذج",
    "naïve – dash",
    "\U0001f408\u200d\u2b1b",
    b"caf\xe9\xff".decode("utf-8", "surrogateescape"),
)
"""Legal letters of several scripts, and all that a terminal, a shell or an encoder may trip over."""

COMMANDS = (
    ("status",),
    ("status", "--history"),
    ("status", "--json", "--history"),
    ("status", "--instance", "nobody"),
    ("set", "5k", "--instance", "chat"),
    ("set", "5k", "--instance", "chat", "--note", "naïve – dash"),
    ("set", "5k", "--instance", "nobody"),
    ("set", "5k", "--instance", "nobody*"),
    ("set", "5k", "--all", "--dry-run"),
    ("set", "5k", "--all", "--json"),
    ("advise", "--instance", "chat"),
    ("advise", "--instance", "nobody"),
    ("metrics",),
    ("doctor",),
    ("doctor", "--json"),
    ("completion", "names"),
    ("set", "5k", "--instance", "\x1b[31m"),
    ("set", "\x1b[31m", "--instance", "chat"),
    ("status", "--\x1b[31m"),
    ("\x1b[31m",),
)


def is_plain(character: str) -> bool:
    """Return whether a character is our own newline or moves, turns and hides nothing."""
    return character == "\n" or unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp", "Co"}


def check(output: bytes, encoding: str, what: object) -> None:
    """Make sure that bytes which go to a terminal are text in its encoding and nothing else."""
    text = output.decode(encoding)
    assert all(map(is_plain, text)), (what, text)
    assert "Traceback" not in text, (what, text)
    assert not any(line.startswith("kvcached-control: forged") for line in text.splitlines()), (what, text)


@contextmanager
def hostile_directory(folder: Path) -> Iterator[Path]:
    """Make a directory with a hostile name, an engine in order, and hostile names and texts all around it."""
    directory = folder / "".join(TEXTS).replace("/", "_")[:60]
    directory.mkdir(mode=0o700)
    toys = Toys(folder)
    toys.directory = directory
    engine = toys.launch("chat", engine=TEXTS[8], gpus="GPU-0")
    try:
        with filled(directory):
            yield directory
    finally:
        engine.kill()
        engine.communicate()


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Put hostile files around the engine, and slots, reports and records of hostile owners that are alive."""
    for text in TEXTS:
        name = text.replace("/", "_")
        (directory / f"{name}.ledger").write_bytes(b"")
        (directory / f"{name}.txt").touch()
    wait_for(lambda: (directory / "GPU-0.ledger").exists(), "ledger")
    with LedgerDirectory(str(directory), writable=True) as opened:
        opened.create("GPU-1")
        for number, text in enumerate(TEXTS):
            ledger = opened.open("GPU-1")
            ledger.handle.register(identity(printable_bytes(text)), 0, 1, number + 1, [Update(0, 16000)])
            report = Report(Update(0, -1), 0, Outcome.UNSUPPORTED_ENGINE, text, 0, 0, 0, 0, 0)
            ledger.handle.acknowledge(report)
            record = AuditRecord(number + 1, Update(0, 1), Update(1, 2), 0, 1, "chat", text, text[:20])
            ledger.handle.audit(record)
        ledger = opened.open("GPU-1")
        ledger.handle.register(identity("legal"), 0, 1, 99, [Update(0, 16000)])
        ledger.handle.acknowledge(Report(Update(0, 5), 0, Outcome.EVICTION_FAILED, TEXTS[1], 1, 2, 3, 4, 5))
        wait_for(lambda: publish(7000, "chat", str(directory), note=TEXTS[0]).accepted, "registration")
        yield


def printable_bytes(text: str) -> str:
    """Return a text that fits a slot and can be encoded there."""
    return text.encode(errors="replace")[:60].decode(errors="ignore")


@contextmanager
def hostile_process(folder: Path) -> Iterator[None]:
    """Run what looks like an engine and has hostile arguments and environment."""
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text("import sys\nprint(flush=True)\nsys.stdin.read()\n")
    command = [sys.executable, "-m", "sglang.launch_server", *TEXTS]
    environment = {**os.environ, "SGLANG_PLUGINS": TEXTS[1], "KVCACHED_LEDGER_DIR": f"/tmp/{TEXTS[1]}"}  # noqa: S108
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_hostile_directory_through_every_command(encoding: str, tmp_path: Path) -> None:
    """Whatever names a directory holds, every command prints plain text, runs nothing and shows no traceback."""
    # Each command meets UTF-8 and one of the narrow encodings.
    utf_8, *narrow = ENCODINGS
    commands = COMMANDS if encoding == utf_8 else COMMANDS[narrow.index(encoding) :: len(narrow)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "SGLANG_PLUGINS": TEXTS[1]}
    environment.pop("COLUMNS", None)
    with hostile_directory(tmp_path) as directory, hostile_process(tmp_path):
        for number, arguments in enumerate(commands):
            result = subprocess.run(
                Control(directory).command(*arguments),
                env={**environment, **({"COLUMNS": "60"} if number % 2 else {})},
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=PATIENCE_S,
                check=False,
                cwd=tmp_path,
            )
            assert result.returncode in range(8), arguments
            check(result.stdout, encoding, arguments)
            check(result.stderr, encoding, arguments)
            if "--json" in arguments:
                json.loads(result.stdout)
            if arguments == ("completion", "names"):
                assert result.stdout == b"chat\nlegal\n"
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_hostile_directory_while_it_is_watched(encoding: str, form: tuple[str, ...], tmp_path: Path) -> None:
    """What ``watch`` prints of a hostile directory is plain text, too."""
    with hostile_directory(tmp_path) as directory:
        process = subprocess.Popen(
            Control(directory).command("watch", *form),
            env={**os.environ, "PYTHONIOENCODING": encoding},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        first = b""
        while b"chat" not in first:
            first += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    check(first + output, encoding, "watch")
    check(errors, encoding, "watch")


def test_filter_lets_letters_of_all_scripts_through() -> None:
    """The filter changes nothing that is a letter, and escapes the rest so that it can be told apart."""
    assert [printable(text) for text in TEXTS[8:12]] == list(TEXTS[8:12])
    assert printable(TEXTS[-1]) == "caf\\xe9\\xff"
    assert printable("a\x1b\n\x9b\u202e\u2028") == "a\\x1b\\n\\x9b\\u202e\\u2028"
    assert all(map(is_plain, printable("".join(map(chr, range(0x3000))))))
