"""What is the same for all commands: output that cannot be written, signals, JSON of failures, help and versions."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.commands import PATIENCE_S, run, wait_for
from support.forked import popen

import kvcached

if TYPE_CHECKING:
    from support.commands import Control, Toys

COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("status", "--instance", "nobody"),
    ("set", "5k", "--instance", "chat"),
    ("set", "5k", "--instance", "chat", "--json"),
    ("set", "5k", "--instance", "nobody", "--json"),
    ("set", "5k", "--instance", "chat", "--wait", "--if-revision", "77"),
    ("set", "5k", "--instance", "nobody", "--dry-run"),
    ("advise", "--instance", "nobody"),
    ("doctor",),
    ("metrics",),
    ("--help",),
    ("set", "5k"),
    ("sett",),
)


def code_with(control: Control, command: tuple[str, ...], redirection: str) -> int:
    """Run a command under a shell's redirection; nobody may see a traceback."""
    line = f'exec "$@" {redirection}'
    full = control.command(*command) if "--help" not in command and "sett" not in command else [
        sys.executable, "-m", "kvcached.control", *command
    ]  # fmt: skip
    return run(["sh", "-c", line, "sh", *full]).returncode


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_closed_outputs_change_no_exit_code(control: Control, toys: Toys, command: tuple[str, ...]) -> None:
    """Whatever of the three standard descriptors is closed, a command does what it does and ends with its code."""
    toys.start("chat")
    # Other engines of this user come and go meanwhile, and change what the doctor finds.
    expected = {0, 1} if command == ("doctor",) else {code_with(control, command, "")}
    for redirection in (">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"):
        assert code_with(control, command, redirection) in expected, redirection


def test_set_with_closed_output_publishes(control: Control, toys: Toys) -> None:
    """Without standard output a limit is published all the same, and the ledger is no place for messages."""
    toys.start("chat")
    assert code_with(control, ("set", "5k", "--instance", "chat", "--wait"), "<&- >&- 2>&-") == 0
    assert control.replica("chat")["applied"] == {"revision": 1, "limit_tokens": 5000}


def test_without_standard_error_nothing_is_said_on_standard_output(control: Control) -> None:
    """With standard error closed, standard output holds the one JSON object and no message."""
    for command in (("set", "1k", "--instance", "zz*"), ("status",), ("set", "1k", "--all"), ("advise",)):
        result = run(["sh", "-c", 'exec "$@" 2>&-', "sh", *control.command(*command, "--json")])
        json.loads(result.stdout)
        assert len(result.stdout.splitlines()) == 1, result.stdout


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != ("--help",)], ids=" ".join)
def test_reader_that_went_away_changes_no_exit_code(control: Control, toys: Toys, command: tuple[str, ...]) -> None:
    """A closed pipe is the reader's choice: the exit code is that of what was done, and nothing is said."""
    toys.start("chat")
    expected = control.run(*command)
    read, write = os.pipe()
    os.close(read)
    process = popen(control.command(*command), stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == expected.returncode or command == ("doctor",)  # other engines come and go meanwhile
    assert (errors == "") == (expected.stderr == ""), errors
    assert "Traceback" not in errors


def test_full_disk_changes_no_exit_code_of_what_was_done(control: Control, toys: Toys) -> None:
    """A publication whose output is lost was made, and its code says so; where output was all there was, it failed."""
    toys.start("chat")
    for command, code in (
        (("set", "5k", "--instance", "chat"), 0),
        (("set", "5k", "--instance", "chat", "--json"), 0),
        (("set", "5k", "--instance", "nobody", "--json"), 3),
        (("set", "5k", "--instance", "chat", "--if-revision", "77", "--json"), 5),
        (("status",), 1),
        (("status", "--json"), 1),
        (("doctor",), 1),
        (("metrics",), 1),
    ):
        with Path("/dev/full").open("w") as full:
            process = popen(control.command(*command), stdout=full, stderr=subprocess.PIPE)
            _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, command) == (code, command)
        line = errors.splitlines()[-1]
        assert line == "kvcached-control: the output could not be written: No space left on device"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_narrow_character_set_changes_no_exit_code(control: Control, toys: Toys, encoding: str) -> None:
    """A note that the terminal's character set lacks is shown escaped, and every command ends as ever."""
    toys.start("chat")
    control.run("set", "5k", "--instance", "chat", "--note", "back – after fault ✓")
    for command in (("status", "--history"), ("status",), ("set", "5k", "--instance", "chat")):
        result = control.run(*command, PYTHONIOENCODING=f"{encoding}:strict")
        assert (result.returncode, command) == (0, command), result.stderr
    assert "back " in control.run("status", "--history", PYTHONIOENCODING=f"{encoding}:strict").stdout


# One JSON object, also of failures

FAILURES = (
    (("advise", "--instance", "nope"), 3),
    (("advise",), 3),
    (("set", "--of-max", "0.9", "--instance", "nope"), 3),
    (("set", "5", "--instance", "nope"), 3),
    (("set", "5", "--instance", "nope-*"), 3),
    (("set", "5", "--all"), 3),
    (("set", "5", "--instance", "nope", "--dry-run"), 3),
    (("set", "5", "--all", "--if-revision", "1"), 2),
    (("set", "5q", "--instance", "nope"), 2),
    (("set", "5", "--instance", "nope", "--wat"), 2),
    (("set", "--instance", "nope"), 2),
    (("status", "--instance", "nope"), 3),
    (("status", "--wat"), 2),
)


@pytest.mark.parametrize(("command", "code"), FAILURES, ids=[" ".join(command) for command, _ in FAILURES])
def test_json_is_one_object_also_of_a_failure(control: Control, command: tuple[str, ...], code: int) -> None:
    """With --json a failing command prints one object and nothing else on standard output, and one line says why."""
    result = control.run(*command, "--json")
    assert result.returncode == code
    assert isinstance(json.loads(result.stdout), dict)
    assert len(result.stderr.splitlines()) <= 1


def test_json_without_the_native_library(control: Control, toys: Toys, tmp_path: Path) -> None:
    """Where the native library is missing every command with --json still prints one object that says so."""
    toys.start("chat")
    (tmp_path / "sitecustomize.py").write_text(
        "from kvcached.ledger import binding\nbinding.LIBRARY_PATH = '/nonexistent/libkvledger.so'\n"
    )
    for command in (
        ("status",),
        ("set", "5k", "--instance", "chat"),
        ("set", "5k", "--all"),
        ("set", "5k", "--instance", "chat", "--dry-run"),
        ("set", "--of-max", "0.9", "--instance", "chat"),
        ("advise",),
    ):
        result = control.run(*command, "--json", PYTHONPATH=str(tmp_path))
        found = json.loads(result.stdout)
        assert result.returncode == 3, command
        assert "/nonexistent/libkvledger.so" in json.dumps(found), command
    result = control.run("metrics", PYTHONPATH=str(tmp_path))
    assert (result.returncode, "/nonexistent/libkvledger.so" in result.stderr) == (3, True)


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_interrupted_wait_says_what_is_published(
    control: Control, toys: Toys, number: signal.Signals, form: tuple[str, ...]
) -> None:
    """A signal during a wait ends it with its code, and one line says that the publication stays."""
    toys.start("chat", trouble="deaf")
    command = control.command("set", "5k", "--instance", "chat", "--wait", "60", *form)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: control.replica("chat")["members"][0]["revision"] == 1, "publication")
    process.send_signal(number)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    if form:
        found = json.loads(output)
        assert (found["accepted"], found["applied"], found["revision"]) == (True, False, 1)
        assert "r1 is published, and the engine will still apply it" in found["warnings"][-1]
    else:
        (line,) = errors.splitlines()
        assert line.endswith("r1 is published, and the engine will still apply it")
        assert output.startswith("accepted r1: 5,000 tokens")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_interrupted_wait_gives_the_cursor_back(control: Control, toys: Toys, number: signal.Signals) -> None:
    """A wait on a terminal hides the cursor for its progress, and shows it again however it is ended."""
    toys.start("chat", trouble="locked")
    master, slave = pty.openpty()
    command = control.command("set", "5k", "--instance", "chat", "--wait", "60")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=slave, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    seen = b""
    while b"\x1b[?25l" not in seen:
        seen += os.read(master, 4096)
    process.send_signal(number)
    try:
        while chunk := os.read(master, 4096):
            seen += chunk
    except OSError:
        pass  # the terminal's other end is closed
    os.close(master)
    assert process.wait(timeout=PATIENCE_S) == 128 + number
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert b"r1 is published, and the engine will still apply it" in seen
    assert b"Traceback" not in seen


@pytest.mark.parametrize("module", ["argparse", "json", "fcntl"])
def test_ctrl_c_while_the_program_loads_shows_no_traceback(control: Control, tmp_path: Path, module: str) -> None:
    """Ctrl-C before a command has begun ends it by the signal, in silence."""
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    result = control.run("set", "5k", "--instance", "chat", PYTHONPATH=str(tmp_path))
    assert result.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert (result.stdout, result.stderr) == ("", "")


# Help and versions


def plain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line with nothing but these words."""
    return run([sys.executable, "-m", "kvcached.control", *arguments], COLUMNS="80")


def test_version_is_told() -> None:
    """The version is that of the package, in Python and on the command line."""
    assert kvcached.__version__
    for option in ("--version", "-V"):
        result = plain(option)
        assert (result.returncode, result.stdout) == (0, f"kvcached-control {kvcached.__version__}\n")


def test_help_comes_without_a_command_too() -> None:
    """The bare program prints the help, as does the word; with a command's name that command's."""
    text = plain("--help").stdout
    for words in ((), ("help",)):
        result = plain(*words)
        assert (result.returncode, result.stdout, result.stderr) == (0, text, "")
    assert plain("help", "set").stdout == plain("set", "--help").stdout


@pytest.mark.parametrize("command", ["set", "status", "watch", "metrics", "advise", "doctor"])
def test_unknown_option_points_to_the_help_of_its_command(control: Control, command: str) -> None:
    """An option that a command does not have is answered with that command's help, not the program's."""
    words = ("5k", "--instance", "chat") if command == "set" else ()
    result = control.run(command, *words, "--wat")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"kvcached-control {command}: unknown arguments: --wat; see kvcached-control {command} --help\n"
    )


def test_limit_after_wait_is_understood_or_answered(control: Control, toys: Toys) -> None:
    """A limit written after --wait is taken as such where it cannot be seconds; else the right order is told."""
    toys.start("chat")
    result = control.run("set", "--wait", "16k", "--instance", "chat")
    assert (result.returncode, result.stdout[:25]) == (0, "applied r1: 16,000 tokens")
    result = control.run("set", "--wait", "16000", "--instance", "chat")
    assert (result.returncode, result.stdout) == (2, "")
    assert "LIMIT or --of-max is missing; write, for example, set 16k before --wait" in result.stderr
    result = control.run("set", "5k", "--wait", "16k", "--instance", "chat")
    assert (result.returncode, "a second LIMIT" in result.stderr) == (2, True)
    assert control.replica("chat")["members"][0]["revision"] == 1


# Conditions


def test_if_different_says_unchanged(control: Control, toys: Toys) -> None:
    """The second of two equal publications changes nothing, says so, and is none in the record."""
    toys.start("chat", gpus="GPU-0,GPU-1")
    words = ("set", "9700", "--instance", "chat", "--if-different")
    assert control.json(*words)["unchanged"] is False
    again = control.json(*words, "--wait")
    assert (again["status"], again["unchanged"], again["revision"], again["applied"]) == ("accepted", True, 1, True)
    result = control.run(*words)
    assert (result.returncode, result.stdout.startswith("unchanged, accepted r1: 9,700 tokens")) == (0, True)
    assert len(control.json("status", "--history")["history"]) == 1
    dry = control.json(*words, "--dry-run")
    assert (dry["unchanged"], dry["revision"]) == (True, 1)
    assert control.json("set", "9701", "--all", "--if-different")["results"][0]["revision"] == 2


def test_if_incarnation_is_what_status_shows(control: Control, toys: Toys) -> None:
    """An incarnation read from status makes a publication conditional on that very engine."""
    engine = toys.start("chat")
    (instance,) = control.json("status")["instances"]
    words = ("set", "5k", "--instance", "chat", "--if-incarnation", instance["incarnation"])
    assert instance["replicas"][0]["incarnation"] == instance["incarnation"]
    assert control.run(*words).returncode == 0
    engine.kill()
    engine.wait()
    toys.start("chat")
    for extra in ((), ("--dry-run",)):
        result = control.run(*words, *extra)
        assert (result.returncode, "restarted or registered again" in result.stderr) == (5, True)
    assert control.run("set", "5k", "--instance", "chat", "--if-incarnation", "xyz").returncode == 2
