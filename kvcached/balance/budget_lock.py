"""The lock of a budget: one supervisor at a time, and its death, however it comes, releases it.

It is an open-file-description lock on ``balance.<name>`` in the ledger directory, as those of the slots: the kernel
drops it, it works across PID namespaces, and no pid is trusted. What the file says of its holder is for people.

A publication's compare-and-swap is made by a short-lived child, which outlives a supervisor that is killed meanwhile.
It has copies of the descriptors, and so the lock is not free before that store was made or is not made any more: a
successor never looks at the ledgers before it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import time
from typing import TYPE_CHECKING, Any

from kvcached.errors import KvcachedError
from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError
from kvcached.printable_text import printable

if TYPE_CHECKING:
    from typing_extensions import Self

PREFIX = "balance."
STATE_SUFFIX = ".json"
MOST_STATE_BYTES = 1 << 20
"""More than any supervisor writes; a reader takes no more of a file that anybody may have put there."""

_WHOLE_FILE = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


LOCK_WAIT_S = 1.0
"""How long a lock that is held is tried again: a supervisor that is restarted may have left such a child behind."""

LOCK_RETRY_S = 0.01


class BudgetTakenError(KvcachedError):
    """Another supervisor holds the budget, or an instance of it; the message names it and what to do."""


class BudgetLock:
    """The lock and the state file beside it. A context manager; for one thread."""

    def __init__(self, ledger_dir: str, name: str) -> None:
        """Take the lock. Raises :class:`BudgetTakenError`, or :class:`LedgerDirectoryError` if that is impossible."""
        self._name = name
        self._directory = LedgerDirectory(ledger_dir, writable=True)
        try:
            self._fd = self._take(time.monotonic() + LOCK_WAIT_S)
        except BaseException:
            self._directory.close()
            raise

    def _take(self, deadline: float) -> int:
        path = f"{self._directory.path}/{PREFIX}{self._name}"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(PREFIX + self._name, flags, self._directory.new_file_mode, dir_fd=self._directory.descriptor)
        except OSError as error:
            message = f"lock {path} cannot be opened: {error.strerror}"
            raise LedgerDirectoryError(message) from error
        try:
            _lock(fd, deadline)
        except OSError as error:
            holder = _holder(fd)
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                message = f"lock {path} cannot be taken: {error.strerror} (file locks may be missing in this sandbox)"
                raise LedgerDirectoryError(message) from error
            message = f"budget {self._name} is held by {holder}; stop it first, or choose another --name"
            raise BudgetTakenError(message) from error
        said = json.dumps({"pid": os.getpid(), "since": time.time()}).encode()
        os.pwrite(fd, said, 0)
        os.ftruncate(fd, len(said))
        return fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the budget up. The files stay: the next supervisor reads the state."""
        if self._fd >= 0:
            os.close(self._fd)
            self._directory.close()
            self._fd = -1

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the state file as a whole. Raises :class:`OSError`."""
        name, descriptor = PREFIX + self._name + STATE_SUFFIX, self._directory.descriptor
        new = f".{name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(new, flags, self._directory.new_file_mode, dir_fd=descriptor)
        with os.fdopen(fd, "w") as file:
            json.dump(state, file)
        os.rename(new, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)

    def read_state(self) -> dict[str, Any]:
        """Return what the last supervisor of this name wrote; nothing where that cannot be read."""
        return read_state(self._directory, self._name)

    def check_others(self, instances: set[str]) -> None:
        """Raise :class:`BudgetTakenError` if a live supervisor of another name balances one of ``instances``."""
        for name in held_budgets(self._directory):
            shared = instances & instances_of(read_state(self._directory, name))
            if name != self._name and shared:
                message = f"{', '.join(sorted(shared))} is balanced by {name} already; stop it, or leave it out"
                raise BudgetTakenError(message)


def _lock(fd: int, deadline: float) -> None:
    """Take the lock of an open file; raise :class:`BlockingIOError` if another one still has it at ``deadline``."""
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOCK_RETRY_S)
        else:
            return


def held_budgets(directory: LedgerDirectory) -> list[str]:
    """Return the names of the budgets that a live supervisor holds, sorted."""
    names = (name.removeprefix(PREFIX) for name in os.listdir(directory.descriptor) if name.startswith(PREFIX))
    return sorted(name for name in names if not name.endswith(STATE_SUFFIX) and _is_held(directory, name))


def _is_held(directory: LedgerDirectory, name: str) -> bool:
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(PREFIX + name, flags, dir_fd=directory.descriptor)
    except OSError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE_FILE)
    except OSError:
        return False
    finally:
        os.close(fd)
    return bool(struct.unpack_from("@h", found)[0] != fcntl.F_UNLCK)


def read_state(directory: LedgerDirectory, name: str) -> dict[str, Any]:
    """Return the state file of a budget; an empty one where it is missing or is none."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(PREFIX + name + STATE_SUFFIX, flags, dir_fd=directory.descriptor)
    except OSError:
        return {}
    with os.fdopen(fd, "rb") as file:
        try:
            state = json.loads(file.read(MOST_STATE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
    return state if isinstance(state, dict) else {}


def instances_of(state: dict[str, Any]) -> set[str]:
    """Return the names of the instances in a state."""
    found = state.get("instances")
    entries = found if isinstance(found, list) else []
    return {entry["name"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)}


def published_of(state: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the incarnation and revision of the newest publication to each instance, as a state has them."""
    found = state.get("published")
    entries = found.items() if isinstance(found, dict) else ()
    return {
        name: (pair[0], pair[1])
        for name, pair in entries
        if isinstance(pair, list) and [type(item) for item in pair] == [str, int]
    }


def _holder(fd: int) -> str:
    """Return who says to hold the lock."""
    try:
        said = json.loads(os.pread(fd, 4096, 0))
        return f"pid {int(said['pid'])} since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(said['since']))}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return printable("another supervisor")
