"""What the world does wrong, as a user meets it at the command line: a sentence, the right exit code, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.commands import AS_USER, PATIENCE_S, Control, run, wait_for

from kvcached.ledger.not_found import other_default_dirs

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.commands import Toys

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")

ONE, OTHER = "GPU-0", "GPU-1"


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return the only line on standard error."""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvcached-control"), line
    return line


def test_no_such_instance_and_no_directory(control: Control, ledger_dir: Path) -> None:
    """No instance, an empty directory and a missing one are unavailable, and the directory is named."""
    for _ in range(2):
        for wait in ((), ("--wait",), ("--dry-run",)):
            result = control.run("set", "5", "--instance", "nobody", *wait)
            assert (result.returncode, result.stdout) == (3, "")
            assert str(ledger_dir) in one_line(result)
        found = control.json("set", "5", "--instance", "nobody", "--wait")
        assert (found["status"], found["applied"]) == ("unavailable", False)
        if ledger_dir.exists():
            ledger_dir.rmdir()


def test_other_directories_of_the_machine_are_named(control: Control) -> None:
    """A user who looks in the wrong directory is told which default ones exist."""
    others = other_default_dirs(str(control.directory))
    message = one_line(control.run("set", "5", "--instance", "nobody"))
    assert all(other in message for other in others)


def test_malformed_names_and_directories(control: Control) -> None:
    """A name or a directory that cannot be is a usage error."""
    for name in ("", ".hidden", "-dash", "a/b", "x" * 64, "näme", "a b", "a\n", "a/*", "*" * 64):
        result = control.run("set", "5", f"--instance={name}")
        assert (result.returncode, name) == (2, name)
        one_line(result)
    result = run([sys.executable, "-m", "kvcached.control", "status", "--ledger-dir", ""])
    assert result.returncode == 2
    one_line(result)


def test_unknown_commands(control: Control) -> None:
    """A mistyped command, or none, is a usage error."""
    for arguments in (("sett", "5"), ("--json",)):
        result = control.run(*arguments)
        assert result.returncode == 2
        one_line(result)


def remove(path: Path) -> None:
    """Let a member's file be gone."""
    path.unlink()


def make_folder(path: Path) -> None:
    """Put a folder in a file's place."""
    path.unlink()
    path.mkdir()


def make_symlink(path: Path) -> None:
    """Put a symlink in a file's place, even one to a ledger."""
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def truncate(path: Path) -> None:
    """Cut a file."""
    os.truncate(path, 0)


def open_to_all(path: Path) -> None:
    """Let everybody write a file."""
    path.chmod(0o666)


@pytest.mark.parametrize("harm", [remove, make_folder, make_symlink, truncate, open_to_all])
def test_one_member_cannot_be_written(
    control: Control, toys: Toys, ledger_dir: Path, harm: Callable[[Path], None]
) -> None:
    """With one member's file spoilt a publication is partial and names it; after repair another one reaches all."""
    engine = toys.start("chat", gpus=f"{ONE},{OTHER}")
    engine.send_signal(signal.SIGSTOP)  # so that it does not register anew at once
    harm(ledger_dir / f"{OTHER}.ledger")
    result = control.run("set", "5k", "--instance", "chat")
    assert (result.returncode, result.stdout) == (4, "")
    message = one_line(result)
    assert "partial: 5,000 tokens for chat" in message
    assert "member 1 of 2 has no usable ledger" in message
    spoilt = ledger_dir / f"{OTHER}.ledger"
    assert str(spoilt) in message or not spoilt.exists()
    if spoilt.is_dir():
        spoilt.rmdir()
    else:
        spoilt.unlink(missing_ok=True)
    engine.send_signal(signal.SIGCONT)
    wait_for(lambda: control.run("set", "6k", "--instance", "chat", "--wait").returncode == 0, "repair")
    assert control.replica("chat")["applied"]["limit_tokens"] == 6000


def test_world_writable_directory(control: Control, toys: Toys, ledger_dir: Path) -> None:
    """Publishing into a directory that everybody may write is refused, with its mode; nothing is written."""
    toys.start("chat")
    ledger_dir.chmod(0o777)
    result = control.run("set", "5k", "--instance", "chat")
    assert result.returncode == 3
    assert "is writable by everyone (owner uid" in one_line(result)
    assert "mode 0777" in result.stderr
    assert control.replica("chat")["members"][0]["revision"] == 0


def test_unusable_files_are_refused_and_the_others_used(control: Control, toys: Toys, ledger_dir: Path) -> None:
    """Files that are no ledgers are named in a warning; a publication beside them is accepted, and none is changed."""
    toys.start("chat", gpus=ONE)
    good = (ledger_dir / f"{ONE}.ledger").read_bytes()
    contents = {
        "empty": b"",
        "half": good[:16384],
        "noise": os.urandom(32768),
        "later": good[:12] + (4).to_bytes(4, sys.byteorder) + good[16:],
        "foreign": good[:8] + good[8:12][::-1] + good[12:],
        "longer": good + b"x",
    }
    for name, content in contents.items():
        (ledger_dir / f"{name}.ledger").write_bytes(content)
    result = control.run("set", "5k", "--instance", "chat", "--wait")
    assert result.returncode == 0
    assert result.stdout.startswith("applied r1: 5,000 tokens")
    message = one_line(result)
    assert all(f"{ledger_dir}/{name}.ledger" in message for name in contents)
    assert {name: (ledger_dir / f"{name}.ledger").read_bytes() for name in contents} == contents


@needs_root
def test_read_only_mount_keeps_a_publication_out_and_says_so(control: Control, toys: Toys, ledger_dir: Path) -> None:
    """Where the ledgers may only be read the instance is known, nothing is published, and a dry run foretells it."""
    toys.start("chat", gpus=f"{ONE},{OTHER}")
    subprocess.run(["mount", "--bind", ledger_dir, ledger_dir], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", ledger_dir], check=True)
        found = control.json("set", "5k", "--instance", "chat")
        result = control.run("set", "5k", "--instance", "chat")
        dry = control.run("set", "5k", "--instance", "chat", "--dry-run")
    finally:
        subprocess.run(["umount", ledger_dir], check=True)
    assert (found["status"], found["revision"]) == ("unavailable", 0)
    assert [(gpu["gpu"], gpu["status"], gpu["limit_tokens"]) for gpu in found["gpus"]] == [
        (ONE, "failed", 16000),
        (OTHER, "failed", 16000),
    ]
    assert (result.returncode, dry.returncode) == (3, 3)
    assert "no live instance" not in result.stderr
    assert f"{ledger_dir}/{ONE}.ledger is read-only for you: Read-only file system" in one_line(result)
    assert control.replica("chat")["members"][0]["revision"] == 0


def test_engine_killed(control: Control, toys: Toys) -> None:
    """An engine that is killed is gone at once, and its name is free again."""
    engine = toys.start("chat")
    engine.kill()
    engine.wait()
    assert control.run("set", "5k", "--instance", "chat").returncode == 3
    toys.start("chat")
    assert control.run("set", "5k", "--instance", "chat", "--wait").returncode == 0


def test_engine_killed_during_a_wait(control: Control, toys: Toys) -> None:
    """A wait ends by itself when the engine does, and says so: exit 3, which is no matter of patience."""
    engine = toys.start("chat", trouble="deaf")
    process = subprocess.Popen(
        control.command("set", "5k", "--instance", "chat", "--wait", "60"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: control.replica("chat")["members"][0]["revision"] == 1, "publication")
    engine.kill()
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "ended during the wait" in errors) == (3, True)
    assert output.startswith("accepted r1")


def test_wait_that_runs_out_tells_who_lags(control: Control, toys: Toys) -> None:
    """A wait that is too short ends with its own code, and names the replica and the reason."""
    toys.start("deaf", trouble="deaf")
    toys.start("busy", trouble="locked")
    result = control.run("set", "5k", "--instance", "deaf", "--wait", "0.2")
    assert result.returncode == 6
    assert "not applied after 0.2 s; replica 0 has not applied it yet" in one_line(result)
    result = control.run("set", "5k", "--instance", "busy", "--wait", "2")
    assert result.returncode == 6
    assert "replica 0 still holds 10000 idle tokens: held" in one_line(result)


def test_engine_that_will_not_apply_ends_a_wait_at_once(control: Control, toys: Toys) -> None:
    """A rejection ends the wait long before its time, with its own code and the reason."""
    toys.start("pipe", trouble="pipeline")
    toys.start("foreign", trouble="unsupported")
    started = time.monotonic()
    for name, reason in (("pipe", "pp_size is 2"), ("foreign", "hook target Scheduler.evict is missing")):
        assert control.run("set", "5k", "--instance", name).returncode == 0
        result = control.run("set", "5k", "--instance", name, "--wait", "600")
        assert result.returncode == 7
        assert reason in one_line(result)
    assert time.monotonic() - started < PATIENCE_S


def test_same_name_twice(toys: Toys, tmp_path: Path) -> None:
    """The second engine of a name fails to start, and says who has it."""
    first = toys.start("chat")
    second = toys.launch("chat", gpus="GPU-9")
    assert second.wait(timeout=PATIENCE_S) != 0
    log = (tmp_path / "engine-1.log").read_text()
    assert f"instance 'chat' (replica 0) is already running: toy with pid {first.pid}" in log


def test_full_table(control: Control, toys: Toys, tmp_path: Path) -> None:
    """The 65th engine serves, says that it is not controlled, and registers when a slot comes free."""
    full = toys.start(*(f"chat-{number}" for number in range(64)))
    late = toys.launch("late")
    log = tmp_path / "engine-1.log"
    wait_for(lambda: "is full, all 64 slots belong to live engines" in log.read_text(), "warning")
    assert late.poll() is None
    assert control.run("set", "5k", "--instance", "late").returncode == 3
    full.kill()
    wait_for(lambda: control.run("set", "5k", "--instance", "late", "--wait").returncode == 0, "registration")


def test_two_publishers_at_once(control: Control, toys: Toys) -> None:
    """Of publishers at the same moment each returns, and all members end equal, on the newest."""
    toys.start("chat", gpus="GPU-0,GPU-1,GPU-2,GPU-3")
    commands = [control.command("set", str(1000 + number), "--instance", "chat", "--json") for number in range(6)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    results = [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in processes]
    assert {result["status"] for result in results} <= {"accepted", "superseded"}
    newest = max(results, key=lambda result: int(result["revision"]))
    replica = control.replica("chat")
    pairs = {(member["revision"], member["limit_tokens"]) for member in replica["members"]}
    assert pairs == {(newest["revision"], newest["limit_tokens"])}
    wait_for(lambda: control.replica("chat")["applied"]["revision"] == newest["revision"], "application")


def test_reserve_of_descriptors_runs_out(control: Control, toys: Toys) -> None:
    """Without descriptors left a command ends with a sentence."""
    toys.start("chat", gpus=",".join(f"GPU-{number}" for number in range(40)))
    for descriptors in (8, 12, 20):
        script = f'ulimit -n {descriptors}; exec "$@"'
        result = run(["sh", "-c", script, "sh", *control.command("set", "5k", "--instance", "chat")])
        assert result.returncode == 3
        assert "Too many open files" in one_line(result)
    assert control.replica("chat")["members"][0]["revision"] == 0


def test_help_has_an_example_each(control: Control) -> None:
    """Each command's help shows an example that begins with the program's name."""
    assert "kvcached-control set 16k" in control.run("--help").stdout
    for command in ("set", "status", "watch", "metrics", "doctor", "completion"):
        text = run([sys.executable, "-m", "kvcached.control", command, "--help"], COLUMNS="80").stdout
        assert f"\n  kvcached-control {command}" in text or f"(kvcached-control {command}" in text
        assert max(map(len, text.splitlines())) <= 80


@needs_root
def test_other_users_files() -> None:
    """A directory and a ledger of another user are refused, with owner and mode."""
    folder = Path(tempfile.mkdtemp(prefix="kvcached-test-"))  # pytest's own folders are closed to other users
    folder.chmod(0o755)
    command = [sys.executable, str(AS_USER), "65534:65534", "control", "set", "5", "--instance", "chat"]
    try:
        os.chown(folder, 12345, 12345)
        result = run([*command, "--ledger-dir", str(folder)])
        assert result.returncode == 3
        assert f"{folder} belongs to another user (owner uid 12345, mode 0755)" in one_line(result)
        os.chown(folder, 65534, 65534)
        (folder / "GPU-0.ledger").write_bytes(bytes(32768))
        result = run([*command, "--ledger-dir", str(folder)])
        assert result.returncode == 3
        assert f"{folder}/GPU-0.ledger" in one_line(result)
        assert "Permission denied (owner uid 0, mode 0644)" in result.stderr
    finally:
        shutil.rmtree(folder)
