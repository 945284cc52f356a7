"""One look at a directory tells apart what can be used, only read, or not be used, and what could not be looked at."""

from __future__ import annotations

import errno
import os
import platform
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.commands import AS_USER, run
from support.toys import identity

from kvcached.ledger import binding
from kvcached.ledger.directory import Fault, LedgerDirectory, LedgerDirectoryError
from kvcached.ledger.instances import get_instances
from kvcached.ledger.not_found import not_found_message, other_default_dirs
from kvcached.ledger.snapshot import FileState, Snapshot, look_again, look_at, open_snapshot, take_snapshot, unwritable
from kvcached.values import Update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcached.ledger.subscription import Subscription

as_root = pytest.mark.skipif(os.getuid() != 0, reason="changing owners and mounting need root")
NO_LOCKS = Path(AS_USER).with_name("no_locks.py")
HOSTILE = (
    "$(touch pwned)",
    "a b",
    "\x1b[31mred",
    "-rf",
    ".hidden",
    "naïve",
    "кот",
    "猫",
    "a\nb",
    "*",
    "../x",
    "a\u202eb",
)


def states(snapshot: Snapshot) -> dict[str, tuple[FileState, Fault | None]]:
    """Return what became of each file."""
    return {look.gpu: (look.state, look.fault) for look in snapshot.files}


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Mount a folder read-only over itself, as a monitoring container has it."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_each_file_is_told_with_its_kind(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """A ledger is usable; what is cut, of another version, no file or misnamed is refused, each as what it is."""
    subscribe("chat", ("cpu-0",))
    good = (ledger_dir / "cpu-0.ledger").read_bytes()
    (ledger_dir / "cut.ledger").write_bytes(good[:100])
    (ledger_dir / "zeros.ledger").write_bytes(bytes(len(good)))
    (ledger_dir / "later.ledger").write_bytes(good[:12] + (9).to_bytes(4, sys.byteorder) + good[16:])
    (ledger_dir / "foreign.ledger").write_bytes(good[:8] + good[8:12][::-1] + good[12:])
    (ledger_dir / "folder.ledger").mkdir()
    (ledger_dir / "a b.ledger").write_bytes(good)
    snapshot = take_snapshot(str(ledger_dir), writable=True)
    assert states(snapshot) == {
        "a b": (FileState.REFUSED, Fault.ILLEGAL_NAME),
        "cpu-0": (FileState.USABLE, None),
        "cut": (FileState.REFUSED, Fault.DAMAGED),
        "folder": (FileState.REFUSED, Fault.NO_LEDGER),
        "foreign": (FileState.REFUSED, Fault.OTHER_VERSION),
        "later": (FileState.REFUSED, Fault.OTHER_VERSION),
        "zeros": (FileState.REFUSED, Fault.DAMAGED),
    }
    assert snapshot.names == ["chat"]
    assert snapshot.unseen == ()
    assert [refusal.gpu for refusal in snapshot.refusals] == ["a b", "cut", "folder", "foreign", "later", "zeros"]


@as_root
def test_read_only_mount_is_no_damage(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """On a read-only mount the ledgers are told as readable only, and who is alive in them is seen."""
    subscribe("chat")
    with read_only(ledger_dir):
        snapshot = take_snapshot(str(ledger_dir), writable=True)
    assert states(snapshot) == dict.fromkeys(("cpu-0", "cpu-1"), (FileState.READ_ONLY, Fault.FORBIDDEN))
    assert (snapshot.refusals, snapshot.unseen, snapshot.names) == ((), (), ["chat"])
    (replica,) = snapshot.replicas
    assert unwritable(replica, snapshot) == [
        f"{ledger_dir}/cpu-{index}.ledger is read-only for you: Read-only file system (owner uid 0, mode 0600)"
        for index in range(2)
    ]


LOOK_AS_ANOTHER = """
import os, sys
from kvcached.ledger import binding
from kvcached.ledger.snapshot import take_snapshot
binding.library_version()
os.setgroups([]); os.setgid(777); os.setuid(54321)
snapshot = take_snapshot(sys.argv[1], writable=True)
print([(look.gpu, look.state.name) for look in snapshot.files], snapshot.names, len(snapshot.unseen))
"""


@as_root
def test_permissions_are_no_damage(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """A ledger that one may read and not write is readable only; one that one may not read was not seen."""
    subscribe("chat", ("cpu-0",))
    subscribe("code", ("cpu-1",))
    for parent in (ledger_dir, *ledger_dir.parents):
        if parent.name.startswith(("pytest-", "popen-", "test_", "ledgers")):  # pytest makes its folders private
            parent.chmod(0o755)
    (ledger_dir / "cpu-0.ledger").chmod(0o644)
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{LOOK_AS_ANOTHER}"
    result = run([sys.executable, "-c", code, str(ledger_dir)])
    assert result.stdout == "[('cpu-0', 'READ_ONLY'), ('cpu-1', 'REFUSED')] ['chat'] 1\n"


def test_names_that_no_instance_can_have_are_refused(ledger_dir: Path) -> None:
    """A slot whose name no engine could register under is no instance, and its name is told in plain letters."""
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        directory.create("cpu-0")
        for number, name in enumerate(["chat", *HOSTILE]):
            directory.open("cpu-0").handle.register(identity(name), 0, 1, number + 1, [Update(0, 16000)])
        snapshot = take_snapshot(str(ledger_dir))
    assert snapshot.names == ["chat"]
    assert [instance.name for instance in get_instances(ledger_dir)] == []
    reasons = [refusal.reason for refusal in snapshot.refusals]
    assert len(reasons) == len(HOSTILE)
    assert all(reason.isascii() and reason.isprintable() for reason in reasons)
    assert "slot 1 is ignored: '$(touch pwned)' is not a valid instance name" in reasons


def test_absent_and_unreadable_directories_differ(tmp_path: Path, ledger_dir: Path) -> None:
    """A directory that is not there is absent; a file in its place, or no descriptor left, is no such thing."""
    assert take_snapshot(str(tmp_path / "nowhere")).fault is Fault.ABSENT
    (tmp_path / "file").write_text("")
    assert take_snapshot(str(tmp_path / "file")).fault is Fault.NO_LEDGER
    assert take_snapshot(str(ledger_dir)).fault is None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        snapshot = take_snapshot(str(ledger_dir))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert snapshot.fault is Fault.SHORTAGE
    assert os.strerror(errno.EMFILE) in snapshot.reason
    assert snapshot.unseen == (snapshot.reason,)


def test_nobody_and_could_not_look_differ(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """Where descriptors suffice for the directory and not for its ledgers, there is an error and no empty answer."""
    subscribe("chat")
    with LedgerDirectory(str(ledger_dir), writable=False) as directory:
        taken = [os.dup(0)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 2, hard))  # one more, for listing
        try:
            snapshot = look_at(directory)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(taken[0])
    assert snapshot.names == []
    assert len(snapshot.unseen) in (1, 2)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is written for x86-64")
def test_sandbox_without_locks_has_not_seen(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """Where the kernel does not answer who holds a lock, a live engine is not called dead: it could not be looked."""
    subscribe("chat", ("cpu-0",))
    code = (
        "import sys; from kvcached.ledger.snapshot import take_snapshot\n"
        "from kvcached.ledger.instances import get_instances\n"
        "snapshot = take_snapshot(sys.argv[1]); print(snapshot.names, *snapshot.unseen)\n"
        "try: print(get_instances(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__)"
    )
    result = run([sys.executable, str(NO_LOCKS), sys.executable, "-c", code, str(ledger_dir)])
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith(f"[] {ledger_dir}/cpu-0.ledger: cannot tell which engines are alive: Invalid argument")
    assert second == LedgerDirectoryError.__name__


def test_looking_again_reads_open_ledgers_anew(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """Files that are open are read again without being opened again; a snapshot that was taken stays as it was."""
    subscribe("chat", ("cpu-0",))
    with open_snapshot(str(ledger_dir)) as snapshot:
        subscribe("code", ("cpu-0",))
        again = look_again(snapshot.path, snapshot.files)
    assert (snapshot.names, again.names) == (["chat"], ["chat", "code"])
    assert again.of("code").names == ["code"]


def test_who_found_nobody_is_told_who_is_there(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """A mistyped name is answered with the live ones; an empty directory with how to start an engine."""
    assert "python -m kvcached.rig" in not_found_message(take_snapshot(str(ledger_dir)), "chta")
    assert "python -m kvcached.rig" in not_found_message(take_snapshot(f"{ledger_dir}/none"))
    subscribe("chat", ("cpu-0",))
    subscribe("code", ("cpu-0",))
    snapshot = take_snapshot(str(ledger_dir))
    assert not_found_message(snapshot, "chta") == f"no live instance 'chta' in {ledger_dir}; live there: chat, code"
    assert not_found_message(snapshot, "x*", pattern=True).startswith("no live instance matches 'x*' in ")


def test_only_directories_of_their_owner_are_default_ones(tmp_path: Path) -> None:
    """A name that anybody can make in a shared folder is no ledger directory: number and owner have to agree."""
    user = os.getuid()
    names = [f"kvcached-{user}", f"kvcached-{user + 1}", "kvcached-\x1b[31m", "kvcached-x\nkvcached-control: hello"]
    for name in [*names, os.fsdecode(b"kvcached-\xff")]:
        (tmp_path / name).mkdir()
    assert other_default_dirs("/elsewhere", str(tmp_path)) == [f"{tmp_path}/kvcached-{user}"]
    assert other_default_dirs(f"{tmp_path}/kvcached-{user}", str(tmp_path)) == []


def test_library_is_the_only_thing_that_is_raised(ledger_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the native library a directory with ledgers cannot be looked at, and that is raised."""
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        directory.create("cpu-0")
    monkeypatch.setattr(binding, "_library", None)
    monkeypatch.setattr(binding, "LIBRARY_PATH", "/nowhere/libkvledger.so")
    with pytest.raises(binding.NativeLibraryError):
        take_snapshot(str(ledger_dir))
