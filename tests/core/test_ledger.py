"""Which directories and files are used, and how the others are refused: by path, owner, mode and reason."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from support.workers import create_once

from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError
from kvcached.ledger.instances import get_instances
from kvcached.ledger.publication import publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcached.ledger.subscription import Subscription

FILE_BYTES = 81920
as_root = pytest.mark.skipif(os.getuid() != 0, reason="changing owners and mounting need root")


def make_ledger(ledger_dir: Path, gpu: str = "cpu-0") -> Path:
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        directory.create(gpu)
    return ledger_dir / f"{gpu}.ledger"


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def refusal(ledger_dir: Path, gpu: str = "cpu-0", *, writable: bool = True) -> str:
    """Return why a ledger is refused."""
    with (
        LedgerDirectory(str(ledger_dir), writable=writable) as directory,
        pytest.raises(LedgerDirectoryError) as caught,
    ):
        directory.open(gpu)
    return str(caught.value)


def test_ledger_is_small_whole_and_private(ledger_dir: Path) -> None:
    """A new ledger has its full size on disk, 48 KiB, and is for its owner alone."""
    status = make_ledger(ledger_dir).stat()
    assert status.st_size == FILE_BYTES
    assert status.st_blocks * 512 >= FILE_BYTES
    assert status.st_mode & 0o777 == 0o600


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize(("directory_mode", "file_mode"), [(0o700, 0o600), (0o755, 0o600), (0o2770, 0o660)])
def test_mode_follows_the_directory_and_not_the_umask(
    umask: int, directory_mode: int, file_mode: int, ledger_dir: Path
) -> None:
    """A directory that its group may write gets ledgers for the group, any other one private ledgers."""
    ledger_dir.chmod(directory_mode)
    before = os.umask(umask)
    try:
        assert make_ledger(ledger_dir).stat().st_mode & 0o777 == file_mode
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is 0 bytes long; a ledger has 81920"),
        (b"x", "is 1 bytes long"),
        (b"x" * (FILE_BYTES // 2), "is 40960 bytes long"),
        (b"\0" * FILE_BYTES, "is not a ledger"),
        (b"\x5a" * FILE_BYTES, "is not a ledger"),
        (b"\0" * (FILE_BYTES + 1), "is 81921 bytes long"),
    ],
)
def test_bad_content_is_refused_by_name_and_reason_and_never_written(
    content: bytes, reason: str, ledger_dir: Path, subscribe: Callable[..., Subscription]
) -> None:
    """A file that is no ledger is named with its reason and left as it is; others are still listed and published to."""
    subscribe(gpus=("cpu-1",))
    bad = ledger_dir / "cpu-0.ledger"
    bad.write_bytes(content)
    assert reason in refusal(ledger_dir)
    assert str(bad) in refusal(ledger_dir)
    assert [instance.name for instance in get_instances(ledger_dir)] == ["engine"]
    result = publish(64, "engine", str(ledger_dir))
    assert result.accepted
    assert str(bad) in result.warnings[0]
    assert bad.read_bytes() == content


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (0, struct.pack(">Q", 0x72656764656C766B), "opposite byte order"),
        (8, struct.pack(">I", 0x01020304), "opposite byte order"),
        (12, struct.pack("=I", 1), "has ledger version 1; this library reads version 3"),
        (12, struct.pack("=I", 0), "has ledger version 0; this library reads version 3"),
        (16, b"\0", "a different layout"),
        (24, struct.pack("=Q", 4096), "a different layout"),
    ],
)
def test_other_versions_are_refused(offset: int, data: bytes, reason: str, ledger_dir: Path) -> None:
    """A ledger of another version, byte order or layout is refused, and the message names both sides."""
    path = make_ledger(ledger_dir)
    patch(path, offset, data)
    before = path.read_bytes()
    assert reason in refusal(ledger_dir)
    assert path.read_bytes() == before


def test_whatever_is_no_file_of_ones_own_is_refused(ledger_dir: Path) -> None:
    """A symlink, a directory, a pipe and a file with two names are refused, and nothing waits for the pipe."""
    target = make_ledger(ledger_dir, "target")
    (ledger_dir / "link.ledger").symlink_to(target)
    (ledger_dir / "folder.ledger").mkdir()
    os.mkfifo(ledger_dir / "pipe.ledger")
    for gpu in ("link", "folder", "pipe"):
        assert "not a regular file" in refusal(ledger_dir, gpu)
    (ledger_dir / "second.ledger").hardlink_to(target)
    assert "has 2 names" in refusal(ledger_dir, "second")


def test_names_that_are_no_gpu_ids_are_refused(ledger_dir: Path) -> None:
    """A file name that cannot be a GPU id is refused before it is opened."""
    (ledger_dir / "a b.ledger").write_bytes(b"")
    assert "cannot name a ledger file" in refusal(ledger_dir, "a b")


def test_world_writable_directory_is_refused_with_owner_and_mode(ledger_dir: Path) -> None:
    """A directory that everybody may write is refused for writing, with path, owner and mode."""
    ledger_dir.chmod(0o777)
    text = rf"{re.escape(str(ledger_dir))} is writable by everyone \(owner uid {os.getuid()}, mode 0777\)"
    with pytest.raises(LedgerDirectoryError, match=text):
        LedgerDirectory(str(ledger_dir), writable=True)


def test_world_writable_ledger_is_refused_with_owner_and_mode(ledger_dir: Path) -> None:
    """A ledger that everybody may write is refused for writing, with owner and mode."""
    make_ledger(ledger_dir).chmod(0o666)
    assert f"is writable by everyone (owner uid {os.getuid()}, mode 0666)" in refusal(ledger_dir)


@as_root
def test_ledger_of_another_owner_is_refused_unless_a_group_shares_the_directory(ledger_dir: Path) -> None:
    """In a private directory a stranger's ledger is refused; in a directory shared by a group it is used."""
    os.chown(make_ledger(ledger_dir), 12345, -1)
    assert "belongs to another user (owner uid 12345, mode 0600)" in refusal(ledger_dir)
    ledger_dir.chmod(0o2770)
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        assert directory.open("cpu-0").gpu == "cpu-0"


AS_NOBODY = """
import os, sys
from kvcached.ledger import binding
from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError
binding.library_version()  # loads the library while its folder can be read
os.setgroups([])
os.setgid(int(sys.argv[3])); os.setuid(54321)
try:
    with LedgerDirectory(sys.argv[1], writable=sys.argv[2] == "w") as directory:
        print(*[ledger.gpu for ledger in directory.open_all()], *[refusal.reason for refusal in directory.refusals])
except LedgerDirectoryError as error:
    print(error)
"""


def as_nobody(ledger_dir: Path, mode: str, gid: int = 54321) -> str:
    """Open a directory as another user of a group, and return what came of it."""
    for parent in ledger_dir.parents:
        if parent.name.startswith(("pytest-", "popen-", "test_")):  # pytest makes its folders private
            parent.chmod(0o755)
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{AS_NOBODY}"
    command = [sys.executable, "-c", code, str(ledger_dir), mode, str(gid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@as_root
def test_other_users_may_look_but_not_publish(ledger_dir: Path) -> None:
    """A readable directory can be watched by others; writing to it is refused with owner and mode."""
    os.chown(ledger_dir, 1, 1)
    make_ledger(ledger_dir).chmod(0o644)
    ledger_dir.chmod(0o755)
    assert as_nobody(ledger_dir, "r") == "cpu-0"
    assert "belongs to another user (owner uid 1, mode 0755)" in as_nobody(ledger_dir, "w")


@as_root
def test_a_group_can_share_a_directory(ledger_dir: Path) -> None:
    """A member of the directory's group may write its ledgers, and a stranger may not."""
    os.chown(ledger_dir, 1, 777)
    ledger_dir.chmod(0o2770)
    make_ledger(ledger_dir)
    assert as_nobody(ledger_dir, "w", gid=777) == "cpu-0"
    assert "Permission denied (owner uid 1, mode 2770)" in as_nobody(ledger_dir, "w")
    for mode, gid in ((0o755, 777), (0o775, 54321)):  # a member where the group may not write; a stranger where it may
        ledger_dir.chmod(mode)
        assert "not to a group that shares it with you" in as_nobody(ledger_dir, "w", gid=gid)


@as_root
def test_default_directory_of_a_stranger_is_refused(ledger_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default directory lies where everybody may create names, so a foreign one is refused even for root."""
    monkeypatch.setattr("kvcached.ledger.directory.default_ledger_dir", lambda: str(ledger_dir))
    os.chown(ledger_dir, 12345, 12345)
    with pytest.raises(LedgerDirectoryError, match=r"belongs to another user \(owner uid 12345"):
        LedgerDirectory(str(ledger_dir), writable=False)


def test_default_directory_behind_a_symlink_is_refused(
    ledger_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default directory is not followed through a symlink that somebody planted."""
    link = tmp_path / "planted"
    link.symlink_to(ledger_dir)
    monkeypatch.setattr("kvcached.ledger.directory.default_ledger_dir", lambda: str(link))
    with pytest.raises(LedgerDirectoryError, match="cannot be opened"):
        LedgerDirectory(str(link), writable=True)


@pytest.mark.parametrize("what", ["missing", "file"])
def test_directory_that_is_none(what: str, tmp_path: Path) -> None:
    """A directory that does not exist, or is a file, is named."""
    path = tmp_path / "x"
    if what == "file":
        path.write_text("")
    with pytest.raises(LedgerDirectoryError, match=re.escape(f"ledger directory {path} cannot be opened")):
        LedgerDirectory(str(path), writable=False)


@as_root
def test_full_tmpfs_is_an_error_at_creation(tmp_path: Path) -> None:
    """On a full file system the creation fails with a sentence, leaves nothing behind, and nobody meets a SIGBUS."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k,mode=0700", "tmpfs", str(mount)], check=True)
    try:
        with LedgerDirectory(str(mount), writable=True) as directory:
            directory.create("cpu-0")
            with pytest.raises(LedgerDirectoryError, match=r"cpu-2\.ledger cannot be created: No space left on device"):
                [directory.create(f"cpu-{index}") for index in range(1, 3)]
            assert directory.gpu_ids() == ["cpu-0", "cpu-1"]
        assert [path.name for path in mount.iterdir() if path.name.startswith(".")] == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_link_in_a_ledgers_place_is_not_the_ledger(ledger_dir: Path, tmp_path: Path) -> None:
    """A ledger that was moved away and linked back is not current: nobody else would open it through the link."""
    path = make_ledger(ledger_dir)
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        ledger = directory.open("cpu-0")
        assert ledger.is_current()
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert not ledger.is_current()


def test_registration_lock_is_waited_for_until_the_deadline(ledger_dir: Path) -> None:
    """Who finds the lock taken waits for it as long as it may, goes on without it, and gets it once it is free."""
    path = str(ledger_dir)
    with LedgerDirectory(path, writable=True) as first, LedgerDirectory(path, writable=True) as second:
        first.lock(time.monotonic())
        deadline = time.monotonic() + 0.05
        second.lock(deadline)
        assert time.monotonic() >= deadline
        first.unlock()
        second.lock(time.monotonic())
        with pytest.raises(BlockingIOError):
            fcntl.flock(first.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_sweep_removes_what_killed_page_writers_left_and_nothing_else(ledger_dir: Path) -> None:
    """Half-made pages go, whatever cannot be removed; other files stay, hidden ones and new ones, too."""
    half_made = [f".cpu-0.{number}.advice.0123456789abcdef.new" for number in range(5)]
    others = [".notes", "notes.new", ".notes.new", ".cpu-0.advice.old"]
    for name in [*half_made, *others]:
        (ledger_dir / name).write_bytes(b"")
    stubborn = [f".gpu-{number}.0.advice.0123456789abcdef.new" for number in range(5)]
    for name in stubborn:
        (ledger_dir / name).mkdir()
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        directory.sweep()
    assert {path.name for path in ledger_dir.iterdir()} == {*others, *stubborn}


def test_directory_works_without_standard_input(ledger_dir: Path) -> None:
    """Where descriptor 0 is free the directory gets it, and gives it back."""
    code = f"""
import os
from kvcached.ledger.directory import LedgerDirectory
os.close(0)
directory = LedgerDirectory({str(ledger_dir)!r}, writable=True)
directory.create("cpu-0")
assert (directory.descriptor, directory.open("cpu-0").gpu) == (0, "cpu-0")
directory.close()
try:
    os.fstat(0)
except OSError:
    print("given back")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "given back\n"


def test_many_creators_make_one_file(ledger_dir: Path) -> None:
    """Of fifty creations at once exactly one makes the file, and all others find it whole."""
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        results = pool.map(create_once, [str(ledger_dir)] * 50, chunksize=1)
    assert sum(made for made, _ in results) == 1
    assert len({inode for _, inode in results}) == 1
    assert [path.name for path in ledger_dir.iterdir()] == ["cpu-0.ledger"]
