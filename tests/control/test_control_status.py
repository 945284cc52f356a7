"""``status``: the table for people, the exact figures for programs, and the history of publications."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from support.commands import Control, Toys

GPUS = "GPU-0,GPU-1,GPU-2,GPU-3"


def test_table_shows_desired_applied_outcome_and_figures(control: Control, toys: Toys) -> None:
    """The table shows what was asked for, what holds, and the cache's figures."""
    toys.start("chat", gpus=GPUS)
    control.run("set", "5k", "--instance", "chat", "--wait")
    lines = control.run("status").stdout.splitlines()
    assert lines[0].split() == ["INSTANCE", "DESIRED", "APPLIED", "OUTCOME", "EVICTED", "AGE"]
    assert lines[1].split() == ["ENGINE", "CACHE", "IDLE", "ACTIVE", "CAPACITY", "ERRORS"]
    assert lines[2].split()[:7] == ["chat", "r1", "5,000", "r1", "5,000", "applied", "5,008"]
    assert lines[3].split()[-4:] == ["4,992", "2,000", "100,000", "0"]
    assert "4 GPUs" in lines[3]


def test_table_fits_eighty_columns_and_loses_no_figure(control: Control, toys: Toys) -> None:
    """On a narrow terminal only the name is cut; in a pipe nothing is."""
    name = "a-model-with-a-name-as-long-as-names-may-be-which-is-63-letters"
    toys.start(name, capacity=2_000_000_000, idle=1_900_000_000, startup_limit=-1, trouble="unsupported")
    narrow = control.run("status", COLUMNS="80").stdout
    assert max(map(len, narrow.splitlines())) <= 80
    assert name not in narrow
    assert name in control.run("status").stdout


def test_remarks_give_the_reason(control: Control, toys: Toys) -> None:
    """A rejection, a failed eviction and tokens that are held are explained below their row."""
    toys.start("pipe", gpus=GPUS, trouble="pipeline")
    toys.start("broken", trouble="eviction")
    toys.start("busy", trouble="locked")
    toys.start("foreign", trouble="unsupported")
    toys.start("deaf", trouble="deaf")
    for instance in ("pipe", "broken", "busy", "deaf"):
        control.run("set", "none", "--instance", instance, "--wait", "0.5")
    text = control.run("status", COLUMNS="200").stdout
    assert "rejected, 16,000 stays in force: pp_size is 2" in text
    assert "RuntimeError: the block table is locked" in text
    assert "10,000 tokens above the limit cannot be evicted now" in text
    assert "not controlled: hook target Scheduler.evict is missing" in text
    assert "r1 0 is published but not applied yet" in text


def test_what_is_held_does_not_count_the_block_that_is_kept(control: Control, toys: Toys) -> None:
    """Of a limit below one block the engine keeps a block, so only what lies above that block is said to be held."""
    toys.start("busy", trouble="locked", idle=48, block_tokens=16)
    control.run("set", "5", "--instance", "busy", "--wait", "0.5")
    assert "32 tokens above the limit cannot be evicted now" in control.run("status", COLUMNS="200").stdout


def test_first_status_says_how_to_start_an_engine(control: Control, ledger_dir: Path) -> None:
    """Where no engine ever ran, with a directory or without, the answer says how to get one."""
    for code in (0, 3):
        result = control.run("status")
        assert result.returncode == code
        assert "start an engine with the plugin, or try one: python -m kvcached.rig" in result.stderr
        if ledger_dir.exists():
            ledger_dir.rmdir()


def test_mistyped_instance_is_answered_with_the_names_there_are(control: Control, toys: Toys) -> None:
    """A name that nobody has is answered with those that are live."""
    toys.start("chat", "code")
    for command in (("status",), ("set", "5k"), ("advise",)):
        result = control.run(*command, "--instance", "caht")
        assert result.returncode == 3
        assert "live there: chat, code" in result.stderr


def test_split_names_the_members(control: Control, toys: Toys, ledger_dir: Path) -> None:
    """Members that carry different pairs are named, with what each carries."""
    engine = toys.start("chat", gpus="GPU-0,GPU-1")
    engine.send_signal(signal.SIGSTOP)  # so that it does not register anew
    (ledger_dir / "GPU-1.ledger").rename(ledger_dir / "away")
    assert control.run("set", "5k", "--instance", "chat").returncode == 4
    assert "split: r1 5,000 in GPU-0; 1 member(s) without a usable ledger" in control.run("status").stdout


def test_colours_only_on_a_terminal(control: Control, toys: Toys) -> None:
    """Colours go to a terminal, not to a pipe, and not where NO_COLOR is set."""
    toys.start("chat")
    command = control.command("status")
    assert "\033[" not in control.run("status").stdout
    assert "\033[32m" not in _in_terminal(command, NO_COLOR="1")
    assert "\033[2m" in _in_terminal(command, NO_COLOR="")


def test_plain_letters_where_the_encoding_has_no_blocks(control: Control, toys: Toys) -> None:
    """A terminal without Unicode gets a bar of plain letters."""
    toys.start("chat", idle=50_000, startup_limit=-1)
    text = control.run("status", PYTHONIOENCODING="ascii").stdout
    assert "######=....." in text


def test_control_characters_of_a_peer_do_not_reach_the_terminal(control: Control, toys: Toys) -> None:
    """A note with an escape sequence, written past the command line, is shown without it."""
    toys.start("chat")
    script = (
        "import sys; from kvcached.ledger.publication import publish; publish(5, 'chat', sys.argv[1], note='\\033[31m')"
    )
    subprocess.run([sys.executable, "-c", script, str(control.directory)], check=True)
    text = control.run("status", "--history").stdout
    assert "note: \\x1b[31m" in text
    assert "\033" not in text


def test_history_tells_who_when_and_what(control: Control, toys: Toys) -> None:
    """Each publication is listed once, oldest first, however many members recorded it."""
    toys.start("chat", gpus=GPUS)
    toys.start("other")
    for limit in ("5k", "unlimited"):
        control.run("set", limit, "--instance", "chat")
    control.run("set", "1k", "--instance", "other")
    first, second = control.json("status", "--history", "--instance", "chat")["history"]
    assert first["old"] == {"revision": 0, "limit_tokens": 16000}
    assert first["new"] == second["old"] == {"revision": 1, "limit_tokens": 5000}
    assert second["new"] == {"revision": 2, "limit_tokens": -1}
    assert (first["uid"], first["program"], first["members"]) == (os.getuid(), "kvcached-control", 4)
    text = control.run("status", "--history").stdout
    assert text.count("kvcached-control[") == 3


def test_engine_logs_each_update_once(control: Control, toys: Toys, tmp_path: Path) -> None:
    """An engine leaves one line per applied and one per rejected update in its log."""
    toys.start("chat")
    toys.start("pipe", trouble="pipeline")
    for limit in ("5k", "unlimited"):
        control.run("set", limit, "--all", "--wait")
    log = (tmp_path / "engine-0.log").read_text()
    assert log.count("INFO kvcached.ledger.subscription revision 1 applied: limit 5000 tokens, 4992 idle\n") == 1
    assert log.count("INFO kvcached.ledger.subscription revision 2 applied: no limit, 4992 idle\n") == 1
    log = (tmp_path / "engine-1.log").read_text()
    assert log.count("WARNING kvcached.bound_policy revision 1 (limit 5000) rejected: pp_size is 2") == 1
    assert " applied: " not in log


def test_history_outlives_the_instance_and_is_bounded(control: Control, toys: Toys) -> None:
    """The last 64 publications stay readable after the engine's end."""
    engine = toys.start("chat")
    script = (
        "import sys; from kvcached.ledger.publication import publish\n"
        "for limit in range(72): publish(limit, 'chat', sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", script, str(control.directory)], check=True)
    engine.kill()
    engine.wait()
    found = control.json("status", "--history")
    assert found["instances"] == []
    assert [entry["new"]["limit_tokens"] for entry in found["history"]] == list(range(8, 72))


def test_unusable_files_are_named_and_the_others_shown(control: Control, toys: Toys, ledger_dir: Path) -> None:
    """A corrupt ledger is named on standard error; the rest is shown, and the exit code is not 0."""
    toys.start("chat")
    (ledger_dir / "GPU-9.ledger").write_bytes(b"")
    result = control.run("status")
    assert result.returncode == 1
    assert "chat" in result.stdout
    assert f"{ledger_dir}/GPU-9.ledger: is 0 bytes long" in result.stderr


def test_missing_instance_and_directory_are_named(control: Control, ledger_dir: Path) -> None:
    """Nothing to show is one sentence that names the directory, with the exit code for unavailable."""
    result = control.run("status", "--instance", "nobody")
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.startswith(f"kvcached-control: no live instance 'nobody' in {ledger_dir}")
    ledger_dir.rmdir()
    result = control.run("status")
    assert result.returncode == 3
    assert result.stderr.startswith(
        f"kvcached-control: ledger directory {ledger_dir} cannot be opened: No such file or directory"
    )


def test_json_needs_no_table_and_keeps_to_one_object(control: Control, toys: Toys) -> None:
    """``--json`` prints one object with the contract's fields."""
    toys.start("chat", gpus="GPU-0,GPU-1")
    found = control.json("status")
    assert found["ledger_dir"] == str(control.directory)
    (instance,) = found["instances"]
    assert set(instance) >= {"name", "engine", "pid", "replicas"}
    (replica,) = instance["replicas"]
    assert [member["gpu"] for member in replica["members"]] == ["GPU-0", "GPU-1"]
    assert replica["outcome"] == "startup"


def test_sixty_four_gpus_with_sixteen_instances(control: Control, toys: Toys) -> None:
    """On 64 GPUs with 16 instances each, every instance is one row (how long that takes: scripts/bench)."""
    gpus = ",".join(f"GPU-{number:02}" for number in range(64))
    toys.start(*(f"model-{number}" for number in range(16)), gpus=gpus, step_s=3600)
    assert control.run("status").stdout.count("64 GPUs") == 16


def _in_terminal(command: list[str], **environment: str) -> str:
    """Run a command with a terminal as its standard output, and return what it wrote."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, env={**os.environ, "TERM": "xterm", **environment})
    os.close(theirs)
    text = bytearray()
    try:
        while chunk := os.read(ours, 4096):
            text += chunk
    except OSError:  # the terminal ends with its last user
        pass
    os.close(ours)
    assert process.wait() == 0
    return text.decode()
