"""``doctor`` calls nothing broken that is well, and nobody an engine who is none: what it cannot know is a note."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.commands import AS_USER, Control, run
from support.toys import identity

from kvcached.control.diagnosis.processes import HeldLedger, Process, is_engine_command
from kvcached.control.diagnosis.running_engines import _judge
from kvcached.ledger.directory import LedgerDirectory
from kvcached.values import Update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.commands import Toys

NO_LOCKS = Path(AS_USER).with_name("no_locks.py")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and changing users need root")


def report(command: list[str], **environment: str) -> dict[str, list[str]]:
    """Run a doctor, and return what it found by level."""
    result = run([*command, "--json"], **environment)
    found: dict[str, list[str]] = {"ok": [], "note": [], "problem": []}
    for check in json.loads(result.stdout)["checks"]:
        found[check["level"]].append(f"{check['subject']}: {check['text']}; {check['remedy']}")
    assert result.returncode == bool(found["problem"])
    return found


def said(findings: list[str], *words: str) -> bool:
    """Return whether one finding has all these words."""
    return any(all(word in finding for word in words) for finding in findings)


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Mount something on a folder while the context lasts."""
    subprocess.run(["mount", *options, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@as_root
def test_read_only_mount_stands_in_nobodys_way(control: Control, toys: Toys) -> None:
    """On a mount that is read-only on purpose the instance is shown, and nothing is a problem or to be removed."""
    engine = toys.start("chat")
    directory = control.directory
    with mounted(directory, "--bind", str(directory)):
        subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
        found = report(control.command("doctor", "--pid", str(engine.pid)))
        text = control.run("doctor", "--pid", str(engine.pid)).stdout
    assert found["problem"] == []
    assert said(found["note"], "cpu-0.ledger is read-only for you: Read-only file system")
    assert said(found["note"], "is mounted read-only here")
    assert said(found["ok"], "chat/0")
    assert said(found["ok"], f"pid {engine.pid}", "is registered here")
    assert "remove" not in text
    assert "no live instance" not in text


@as_root
def test_file_that_may_be_read_only_is_not_broken() -> None:
    """A user who may read but not write the ledgers is told so; a ledger that cannot be read stays a problem."""
    folder = Path(tempfile.mkdtemp(prefix="kvcached-test-"))
    try:
        folder.chmod(0o755)
        with LedgerDirectory(str(folder), writable=True) as directory:
            for gpu in ("cpu-0", "cpu-1"):
                directory.create(gpu)
            directory.open("cpu-0").handle.register(identity("chat"), 0, 1, 1, [Update(0, 16000)])
            (folder / "cpu-0.ledger").chmod(0o644)
            command = [sys.executable, str(AS_USER), "65534:65534", "control", "doctor", "--ledger-dir", str(folder)]
            found = report(command)
    finally:
        shutil.rmtree(folder)
    assert said(
        found["note"], f"{folder} is not writable for uid 65534", "status, watch and metrics work, set does not"
    )
    assert said(found["note"], "cpu-0.ledger is read-only for you: Permission denied")
    assert said(found["ok"] + found["note"], "chat/0")
    assert said(found["problem"], "cpu-1.ledger: Permission denied", "a healthy engine may be using it")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is written for x86-64")
def test_sandbox_without_locks_is_a_problem_and_no_dead_engine(control: Control, toys: Toys) -> None:
    """Where locks do not work, doctor says that, and neither doctor nor status calls a live engine dead."""
    toys.start("chat")
    sandbox = [sys.executable, str(NO_LOCKS)]
    found = report([*sandbox, *control.command("doctor")])
    assert said(found["problem"], "locks, futex", "callers cannot see which are alive", "F_OFD_SETLK")
    assert said(found["problem"], "cpu-0.ledger: cannot tell which engines are alive")
    assert not said(found["ok"], "left by engines that ended")
    result = run([*sandbox, *control.command("status")])
    assert result.returncode == 1
    assert "cannot tell which engines are alive" in result.stderr


@as_root
def test_same_inode_on_another_file_system_is_another_file(toys: Toys, tmp_path: Path) -> None:
    """An engine of one file system is not registered in another one that holds a file of the same number."""
    folders = [toys.directory, tmp_path / "other"]
    folders[1].mkdir()
    options = ("-t", "tmpfs", "-o", "mode=755,size=1m", "none")
    with mounted(folders[0], *options), mounted(folders[1], *options):
        for folder in folders:
            with LedgerDirectory(str(folder), writable=True) as directory:
                directory.create("cpu-0")
        first, second = ((folder / "cpu-0.ledger").stat() for folder in folders)
        assert (first.st_ino, first.st_dev) != (second.st_ino, second.st_dev)
        assert first.st_ino == second.st_ino
        engine = toys.start("chat")
        found = report(Control(folders[1]).command("doctor", "--pid", str(engine.pid)))
        assert said(found["problem"], f"pid {engine.pid}", "registered in another directory", str(folders[0]))
        assert said(report(Control(folders[0]).command("doctor", "--pid", str(engine.pid)))["ok"], "is registered here")
        toys.stop()


@as_root
def test_file_system_without_inodes_is_told_from_a_full_one(tmp_path: Path) -> None:
    """Where bytes are left and no inodes, doctor asks for inodes and not for bytes."""
    with mounted(tmp_path, "-t", "tmpfs", "-o", "mode=755,size=1m,nr_inodes=2", "none"):
        (tmp_path / "cpu-0.ledger").touch()
        found = report(Control(tmp_path).command("doctor"))
    assert said(found["problem"], "free space", "all 2 inodes are used", "more inodes")


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve x",
        "/opt/venv/bin/python3.12 /opt/venv/bin/vllm serve x",
        "python -m vllm.entrypoints.openai.api_server --model x",
        "python3 -u -X dev -m sglang.launch_server --model x",
        "/usr/bin/python3 /opt/vllm/vllm/entrypoints/openai/api_server.py",
        "VLLM::EngineCore",
        "sglang::scheduler_TP0",
        "python -m kvcached.rig --tp 2",
        "sglang serve --model x",
    ],
)
def test_servers_are_engines(line: str) -> None:
    """What serves is an engine, by console script, module, file or title."""
    assert is_engine_command(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "ssh host vllm serve x",
        "ssh host python -m vllm.entrypoints.openai.api_server",
        "docker run --gpus all image vllm serve x",
        "podman exec c python -m sglang.launch_server",
        "vim kvcached.rig",
        "grep -r vllm serve",
        "less /src/vllm/entrypoints/openai/api_server.py",
        "python -m pytest -k kvcached.rig",
        "python -c print('vllm serve')",
        "kubectl exec pod -- vllm serve x",
        "vllm bench serve",
        "python",
        "",
    ],
)
def test_clients_and_editors_are_no_engines(line: str) -> None:
    """A program that has an engine's command line as its argument is none."""
    assert not is_engine_command(line.split())


@contextmanager
def server(folder: Path, python: str = sys.executable, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that bears the command line of an engine, and loads no plugin."""
    (folder / "sglang").mkdir(exist_ok=True)
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text("import sys\nprint(flush=True)\nsys.stdin.read()\n")
    inherited = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    process = subprocess.Popen(
        [python, "-m", "sglang.launch_server"],
        cwd=folder,
        env={**inherited, "HOME": str(folder), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_young_engine_of_another_directory_is_a_note(control: Control, tmp_path: Path) -> None:
    """An engine that was started for another directory is a note from its first second on."""
    with server(tmp_path, KVCACHED_LEDGER_DIR=str(tmp_path)) as engine:
        found = report(control.command("doctor"))
        assert said(found["note"], f"pid {engine.pid}", f"another ledger directory, {tmp_path}")
        assert not said(found["problem"], f"pid {engine.pid}")


def install(folder: Path, name: str, entry_points: str = "") -> None:
    """Put a distribution's description into a package folder."""
    info = folder / f"{name}.dist-info"
    info.mkdir(parents=True)
    project, _, version = name.partition("-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


OURS = "[sglang.srt.plugins]\nkvcached = kvcached.engines.sglang:register\n"


def test_package_is_found_wherever_an_engines_python_looks(control: Control, tmp_path: Path) -> None:
    """Debian's folders, the user's own and PYTHONPATH belong to an engine's Python; another project's is told."""
    prefix = tmp_path / "usr"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    (prefix / "lib" / "python3" / "dist-packages").mkdir(parents=True)
    python = str(prefix / "bin" / "python3")
    with server(tmp_path, python) as engine:
        pid = str(engine.pid)
        found = report(control.command("doctor", "--pid", pid))["problem"]
        assert said(found, "kvcached-control is not installed in its Python", f"{python} -m pip")
        install(prefix / "lib/python3/dist-packages", "kvcached-0.1.6")
        found = report(control.command("doctor", "--pid", pid))["problem"]
        assert said(found, "kvcached-0.1.6, which is another project, and not kvcached-control")
        for folder in ("usr/local/lib/python3.12/dist-packages", ".local/lib/python3.12/site-packages", "path"):
            install(tmp_path / folder, "kvcached_control-0.1.0", OURS)
            environment = {"PYTHONPATH": str(tmp_path / "path")}
            with server(tmp_path, python, **environment) as other:
                found = report(control.command("doctor", "--pid", str(other.pid)))["problem"]
                assert not said(found, "not installed"), folder
                assert not said(found, "another project"), folder
            shutil.rmtree(tmp_path / folder)


def test_two_projects_of_one_name_are_told(control: Control, tmp_path: Path) -> None:
    """Another project's distribution that brings the same import package is a problem with a remedy."""
    assert not said(report(control.command("doctor"))["problem"], "distribution")
    install(tmp_path / "site", "kvcached-0.1.6")
    found = report(control.command("doctor"), PYTHONPATH=str(tmp_path / "site"))["problem"]
    assert said(found, "distribution", "kvcached 0.1.6, another project", "uninstall kvcached")


def test_shell_is_no_engine_because_it_started_one(control: Control, tmp_path: Path) -> None:
    """Asked for a shell's pid, doctor says that it is none and looks at the engine below it."""
    with server(tmp_path):
        pass  # makes the module
    command = ["sh", "-c", '"$0" -m sglang.launch_server; true', sys.executable]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        found = report(control.command("doctor", "--pid", str(shell.pid)))
        assert shell.stdin is not None
        shell.stdin.close()
    assert said(found["note"], f"pid {shell.pid}", "is not an engine")
    assert said(found["problem"] + found["note"], "sglang.launch_server runs without a slot")
    assert not said(found["ok"], f"pid {shell.pid}")


def test_ledger_whose_device_is_not_known_is_a_note() -> None:
    """Where only an inode number is known, as from a mapping that may not be followed, doctor claims nothing."""
    process = Process(os.getpid(), 1, os.getuid(), 0.0)
    process.__dict__["ledgers"] = [HeldLedger("/ledgers/cpu-0.ledger", 7, None, deleted=False)]
    here = {(1, 7), (1, 8)}
    finding = _judge(process, [process], here, "/ledgers", asked_for=True)
    assert (finding.level, "its device is unknown" in finding.text) == ("note", True)
    finding = _judge(process, [process], {(1, 8)}, "/ledgers", asked_for=True)
    assert "is registered in another directory" in finding.text
