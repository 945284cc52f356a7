"""``doctor`` names the cause of each thing that can stand in the way, and ends with 0 only if nothing does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.commands import AS_USER, Control, run, wait_for

import kvcached
from kvcached.ledger import binding
from kvcached.values import Bound, BoundReport, Identity, Outcome, Report, Update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.commands import Toys

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


def problems(control: Control, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """Return the problems that the doctor finds; the exit code has to agree with them."""
    result = control.run("doctor", "--json", *arguments, **environment)
    found = json.loads(result.stdout)
    assert result.returncode == int(not found["ok"])
    assert result.stderr == ""
    return [check for check in found["checks"] if check["level"] == "problem"]


def named(found: list[dict[str, Any]], *words: str) -> bool:
    """Return whether one of the problems names all ``words``."""
    return any(
        all(word in f"{check['subject']} {check['text']} {check['remedy']}" for word in words) for check in found
    )


@contextmanager
def handle(directory: Path, gpu: str) -> Iterator[binding.Handle]:
    """Open a ledger as an engine would, making it if need be."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    binding.create_ledger(fd, f"{gpu}.ledger", 0o600)
    opened = binding.Handle(fd, f"{gpu}.ledger", writable=True)
    os.close(fd)
    yield opened
    opened.close()


def identity(name: str) -> Identity:
    """Return a replica's identity."""
    return Identity(name, "toy", "1.0", 0, 1, 1, 16000, 16)


def test_nothing_in_the_way(control: Control, toys: Toys) -> None:
    """With an engine in order there are no problems, each check prints one line, and the exit code is 0."""
    engine = toys.start("chat", gpus="GPU-0,GPU-1")
    result = control.run("doctor", "--pid", str(engine.pid))
    assert result.returncode == 0, result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1] == "no problems"
    subjects = ["python", "cffi", "native library", "locks, futex", "ledger directory", "free space", "ledger files"]
    assert all(any(line.startswith(f"ok       {subject}") for line in lines) for subject in subjects)
    assert any("chat/0" in line and "2 member(s), applies r0 16,000" in line for line in lines)
    assert any(f"pid {engine.pid}" in line and "is registered here" in line for line in lines)


def test_figures_of_memory_are_no_problem(control: Control, ledger_dir: Path) -> None:
    """An engine that reports its KV memory and a cap in force is in order, and the lines say so."""
    cap = BoundReport(Update(1, 2000, Bound.CAP), 1, Outcome.APPLIED, "")
    sizes = {"token_bytes": 16, "pool_bytes": 65536, "resident_bytes": 32768, "returned_bytes": 32768, "returns": "yes"}
    report = Report(Update(0, 16000), 0, Outcome.STARTUP, "", 0, 0, 4096, 0, 0, cap=cap, **sizes)  # type: ignore[arg-type]
    with handle(ledger_dir, "GPU-0") as ledger:
        ledger.register(identity("chat"), 0, 1, 1, [Update(0, 16000), cap.applied], report=report)
        result = control.run("doctor", "--pid", str(os.getpid()))  # not the engines of other tests
        assert result.returncode == 0, result.stdout
        lines = [" ".join(line.split()) for line in result.stdout.splitlines() if "chat/0" in line]
    assert "1 member(s), applies r0 16,000" in lines[-1]
    assert {line.split()[0] for line in lines} == {"ok"}
    assert any("KV memory: 32.0 KiB of 64.0 KiB resident" in line for line in lines)


def test_it_says_which_directory_and_why(control: Control, tmp_path: Path) -> None:
    """The directory's origin is told: the option, the variable, or the default."""
    command = [sys.executable, "-m", "kvcached.control", "doctor"]
    assert f"{control.directory}, named by --ledger-dir" in control.run("doctor").stdout
    assert f"{tmp_path}, from KVCACHED_LEDGER_DIR" in run(command, KVCACHED_LEDGER_DIR=str(tmp_path)).stdout
    default = f"/dev/shm/kvcached-{os.getuid()}, the default, since KVCACHED_LEDGER_DIR is not set"  # noqa: S108 - the contract's
    assert default in run(command, KVCACHED_LEDGER_DIR="").stdout


def test_missing_directory(control: Control, ledger_dir: Path) -> None:
    """A directory that does not exist is a problem with a remedy."""
    ledger_dir.rmdir()
    assert named(problems(control), str(ledger_dir), "No such file", "start an engine")


def test_world_writable_directory(control: Control, ledger_dir: Path) -> None:
    """A directory that everybody may write is named with its mode."""
    ledger_dir.chmod(0o777)
    assert named(problems(control), str(ledger_dir), "is writable by everyone", "mode 0777", "chmod o-w")


@contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that other users can reach, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="kvcached-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def doctor_as_nobody(directory: Path) -> list[dict[str, Any]]:
    """Let another user ask the doctor."""
    command = [sys.executable, str(AS_USER), f"{NOBODY}:{NOBODY}", "control", "doctor", "--json"]
    result = run([*command, "--ledger-dir", str(directory)])
    assert result.returncode == 1, result.stderr
    return [check for check in json.loads(result.stdout)["checks"] if check["level"] == "problem"]


@needs_root
def test_unwritable_directory() -> None:
    """A directory of root's that may not be written is named with owner and mode."""
    with open_folder() as folder:
        found = doctor_as_nobody(folder)
    assert named(found, f"{folder} is not writable for uid {NOBODY} (owner uid 0, mode 0755)", "give write permission")


@needs_root
def test_foreign_directory() -> None:
    """A directory of another user is named with owner and mode."""
    with open_folder() as folder:
        os.chown(folder, 12345, 12345)
        found = doctor_as_nobody(folder)
    assert named(found, f"{folder} belongs to another user (owner uid 12345, mode 0755)")


def test_corrupt_files(control: Control, ledger_dir: Path, toys: Toys) -> None:
    """Every file that is no ledger is named with the reason, and none is changed."""
    toys.start("chat")
    good = (ledger_dir / "cpu-0.ledger").read_bytes()
    contents = {
        "empty": b"",
        "half": good[: len(good) // 2],
        "zeros": bytes(len(good)),
        "noise": os.urandom(len(good)),
    }
    for name, content in contents.items():
        (ledger_dir / f"{name}.ledger").write_bytes(content)
    (ledger_dir / "folder.ledger").mkdir()
    (ledger_dir / "link.ledger").symlink_to("cpu-0.ledger")
    found = problems(control)
    assert named(found, "empty.ledger", "is 0 bytes long; a ledger has 81920", "remove it")
    assert named(found, "half.ledger", "is 40960 bytes long")
    assert named(found, "zeros.ledger", "wrong magic number")
    assert named(found, "noise.ledger", "wrong magic number")
    assert named(found, "folder.ledger")
    assert named(found, "link.ledger")
    assert {name: (ledger_dir / f"{name}.ledger").read_bytes() for name in contents} == contents


def test_ledger_of_another_version(control: Control, ledger_dir: Path) -> None:
    """A ledger of a later version is named with both versions."""
    with handle(ledger_dir, "GPU-0"):
        pass
    _overwrite(ledger_dir / "GPU-0.ledger", 12, (9).to_bytes(4, sys.byteorder))
    assert named(problems(control), "GPU-0.ledger", "has ledger version 9; this library reads version 3")


def test_ledger_of_the_other_byte_order(control: Control, ledger_dir: Path) -> None:
    """A ledger that was copied from a machine of the other byte order is named as such."""
    with handle(ledger_dir, "GPU-0"):
        pass
    path = ledger_dir / "GPU-0.ledger"
    _overwrite(path, 8, path.read_bytes()[8:12][::-1])
    assert named(problems(control), "GPU-0.ledger", "byte order")


def _overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_missing_library(tmp_path: Path) -> None:
    """A package without its library says so and names the file; so do set and status, in one line each."""
    source = Path(kvcached.__file__).parent
    shutil.copytree(
        source, tmp_path / "kvcached", ignore=shutil.ignore_patterns("libkvledger.so", "__pycache__", "rig")
    )
    ledger = tmp_path / "ledger"
    ledger.mkdir(mode=0o700)
    (ledger / "GPU-0.ledger").write_bytes(bytes(32768))

    def control(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvcached.control", *arguments, "--ledger-dir", str(ledger)]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    result = control("doctor", "--json")
    assert result.returncode == 1, result.stderr
    found = [check for check in json.loads(result.stdout)["checks"] if check["level"] == "problem"]
    assert named(found, "native library", f"{tmp_path}/kvcached/ledger/libkvledger.so", "reinstall kvcached")
    for arguments in (("status",), ("set", "5", "--instance", "chat"), ("set", "5", "--all")):
        result = control(*arguments)
        assert result.returncode == 3, result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr


def test_two_instances_with_one_name(control: Control, ledger_dir: Path) -> None:
    """Two live engines of one name are named; publishing to them and showing them say the same."""
    with handle(ledger_dir, "GPU-0") as one, handle(ledger_dir, "GPU-1") as other:
        one.register(identity("chat"), 0, 1, 1, [Update(0, 16000)])
        other.register(identity("chat"), 0, 1, 2, [Update(0, 16000)])
        assert named(problems(control), "two live engines are named 'chat'", "rename it")
        for arguments, code in ((("set", "5", "--instance", "chat"), 3), (("status",), 1)):
            result = control.run(*arguments)
            assert result.returncode == code
            assert "two live engines are named 'chat'" in result.stderr


def test_full_table(control: Control, ledger_dir: Path) -> None:
    """A ledger of which all slots belong to live engines is named."""
    with ExitStack() as stack:
        for number in range(64):
            ledger = stack.enter_context(handle(ledger_dir, "GPU-0"))
            ledger.register(identity(f"chat-{number}"), 0, 1, number + 1, [Update(0, 16000)])
        assert named(problems(control), "GPU-0.ledger is full: all 64 slots", "another ledger directory")


def test_slots_of_the_dead_are_counted_and_no_problem(control: Control, toys: Toys) -> None:
    """What engines left that were killed is counted, and is no problem."""
    engine = toys.start("chat", "code")
    other = toys.start("other")
    engine.kill()
    engine.wait()
    text = control.run("doctor", "--pid", str(other.pid)).stdout
    assert "1 valid; slots: 1 live, 2 left by engines that ended" in text
    assert text.endswith("no problems\n")


def test_uncontrolled_instances(control: Control, toys: Toys) -> None:
    """An engine that rejects, fails, is unsupported or is stopped is named with the reason."""
    toys.start("pipe", trouble="pipeline")
    toys.start("foreign", trouble="unsupported")
    toys.start("broken", trouble="eviction")
    toys.start("deaf", trouble="deaf")
    control.run("set", "1k", "--all", "--wait", "1")
    found = problems(control)
    assert named(found, "pipe/0", "r1 rejected", "pp_size is 2")
    assert named(found, "foreign/0", "not controlled: hook target Scheduler.evict is missing")
    assert named(found, "broken/0", "the block table is locked")
    assert named(found, "deaf/0", "not applied yet", "is its scheduler stopped?")


@contextmanager
def stub_server(folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that bears the command line of an engine and loads no plugin."""
    (folder / "sglang").mkdir(exist_ok=True)
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text("import sys\nprint(flush=True)\nsys.stdin.read()\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang.launch_server", "--model", "x"],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_engine_without_plugin(control: Control, tmp_path: Path) -> None:
    """An engine that runs without a slot is found, with the likeliest reason."""
    reasons = (
        ({"KVCACHED_DISABLE": "1"}, "KVCACHED_DISABLE=1 is in its environment"),
        ({"SGLANG_PLUGINS": "other"}, "SGLANG_PLUGINS='other' excludes kvcached"),
        ({"KVCACHED_LEDGER_DIR": str(tmp_path)}, f"it was started for another ledger directory, {tmp_path}"),
    )
    for environment, reason in reasons:
        with stub_server(tmp_path, **environment) as server:
            found = problems(control, "--pid", str(server.pid))
            assert named(found, f"pid {server.pid}", "sglang.launch_server", "runs without a slot", reason)


def test_engine_in_another_directory(control: Control, toys: Toys, tmp_path: Path) -> None:
    """An engine that is registered elsewhere is found, with the option that leads to it."""
    engine = toys.start("chat")
    (tmp_path / "mine").mkdir(mode=0o700)
    found = problems(Control(tmp_path / "mine"), "--pid", str(engine.pid))
    assert named(found, f"pid {engine.pid}", "in another directory", f"use --ledger-dir {control.directory}")


def test_removed_ledger(control: Control, toys: Toys, ledger_dir: Path) -> None:
    """An engine whose ledger was removed is found while it cannot register again."""
    engine = toys.start("chat")
    ledger_dir.chmod(0o777)  # which an engine refuses
    (ledger_dir / "cpu-0.ledger").unlink()
    pid = str(engine.pid)
    wait_for(lambda: named(problems(control, "--pid", pid), f"pid {pid}"), "finding about the removed ledger")
    ledger_dir.chmod(0o700)
    wait_for(lambda: not problems(control, "--pid", pid), "new registration")


def test_switched_off_in_this_environment(control: Control) -> None:
    """Variables that would keep the next engine from loading the plugin are named."""
    found = problems(control, KVCACHED_DISABLE="1", VLLM_PLUGINS="lora")
    assert named(found, "KVCACHED_DISABLE=1 is set", "unset KVCACHED_DISABLE")
    assert named(found, "VLLM_PLUGINS='lora' excludes kvcached", "add kvcached")


def test_process_that_is_not_there(control: Control) -> None:
    """A pid that nobody has is a problem; one that cannot be is a usage error."""
    assert named(problems(control, "--pid", "4194303"), "no process 4194303")
    for text in ("0", "-5", "x", "9" * 12):
        result = control.run("doctor", "--pid", text)
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
