"""A directory of ledgers: which directory may be trusted, and which files in it.

Imported by engines and by the command line; imports the native binding and plain values only.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import time
from contextlib import suppress

from kvcached.errors import KvcachedError
from kvcached.ledger import binding
from kvcached.ledger.codes import RefusedLedgerError, Unfit
from kvcached.ledger.open_ledger import Ledger
from kvcached.ledger.ownership import GROUP_WRITE, OTHERS_WRITE, describe, directory_problem, ownership
from kvcached.light_dataclasses import dataclass
from kvcached.settings import SettingsError, check_gpu_id, default_ledger_dir

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from kvcached.ledger.contents import FileStatus

SUFFIX = ".ledger"
ADVICE_SUFFIX = ".advice"
DAMAGED_SUFFIX = ".damaged"
"""What is appended to the name of a ledger that was damaged under its engine and set aside."""

LOCK_RETRY_S = 0.01
"""How often a busy registration lock is tried again."""


class Fault(enum.Enum):
    """Why a directory or a file in it is not used. Each has a remedy of its own, and some are nobody's fault."""

    ABSENT = "absent"
    FORBIDDEN = "forbidden"  # by its mode, or by a mount that is read-only
    UNTRUSTED = "untrusted"  # its owner or mode allow others to write it
    NO_LEDGER = "no ledger"
    DAMAGED = "damaged"
    OTHER_VERSION = "of another version"
    ILLEGAL_NAME = "illegal name"
    SHORTAGE = "shortage"  # the caller's own: it has no descriptor or no memory left
    UNKNOWN = "unknown"  # the system would not say: an input error, a sandbox


_UNFIT = {
    Unfit.NO_LEDGER: Fault.NO_LEDGER,
    Unfit.DAMAGED: Fault.DAMAGED,
    Unfit.OTHER_VERSION: Fault.OTHER_VERSION,
}
_ERRORS = {
    errno.ENOENT: Fault.ABSENT,
    errno.ENOTDIR: Fault.NO_LEDGER,
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), Fault.FORBIDDEN),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM), Fault.SHORTAGE),
}


def fault_of(error: OSError) -> Fault:
    """Return what kept the system from opening or listing something."""
    return _ERRORS.get(error.errno or 0, Fault.UNKNOWN)


class LedgerDirectoryError(KvcachedError):
    """A ledger directory, or a file in it, cannot be used; the message names it, the reason and what to do."""

    def __init__(self, message: str, fault: Fault = Fault.UNKNOWN) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True)
class Refusal:
    """A file that is not used as a ledger: where it is and why, in one sentence."""

    gpu: str
    path: str
    reason: str
    fault: Fault = Fault.UNKNOWN


class LedgerDirectory:
    """An opened and vetted ledger directory. Use as a context manager: it closes what was opened through it."""

    def __init__(self, path: str, *, writable: bool, create: bool = False) -> None:
        """Open the directory. Raises :class:`LedgerDirectoryError`.

        Args:
            path: The directory.
            writable: Whether ledgers will be written; then the directory's owner and mode must be trustworthy.
            create: Whether to make it, with mode 0700, if it does not exist.

        """
        self.path = path
        self.writable = writable
        self.refusals: list[Refusal] = []
        self._opened: list[Ledger] = []
        self._fd = -1
        self._fd = self._open(create=create)

    def _open(self, *, create: bool) -> int:
        is_default = self.path == default_ledger_dir()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if is_default else 0)
        try:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(self.path, 0o700)
            fd = os.open(self.path, flags)
        except OSError as error:
            message = f"ledger directory {self.path} cannot be opened: {error.strerror}{ownership(self.path)}"
            raise LedgerDirectoryError(message, fault_of(error)) from error
        self._status = os.fstat(fd)
        problem = directory_problem(self._status, is_default=is_default, writable=self.writable)
        if problem:
            os.close(fd)
            message = f"ledger directory {self.path} {problem}"
            raise LedgerDirectoryError(message, Fault.UNTRUSTED)
        return fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory and all ledgers that were opened through it and not detached. May be called twice."""
        for ledger in self._opened:
            ledger.handle.close()
        self._opened.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def is_current(self) -> bool:
        """Return whether the path still leads to the directory that is open here."""
        try:
            return os.path.samestat(os.stat(self.path), self._status)
        except OSError:
            return False

    @property
    def descriptor(self) -> int:
        """The directory's file descriptor, for files beside the ledgers; valid until :meth:`close`."""
        return self._fd

    @property
    def new_file_mode(self) -> int:
        """The mode of new files: a directory that its group may write gets files that the group may write."""
        return 0o660 if self._status.st_mode & GROUP_WRITE else 0o600

    def detach(self, ledger: Ledger) -> None:
        """Hand a ledger over to the caller, who closes it."""
        self._opened.remove(ledger)

    def lock(self, deadline: float) -> None:
        """Take the directory's registration lock until :meth:`unlock` or :meth:`close`, if it comes free in time.

        Registrations that hold it do not disturb each other. Nothing depends on it: a stopped process must not keep
        others from registering, so one that does not get it before ``deadline`` (``time.monotonic()``) goes on without.
        """
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return
                time.sleep(LOCK_RETRY_S)
            else:
                return

    def unlock(self) -> None:
        """Give the registration lock up if held, also on behalf of a child to which a fork gave a copy of it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def gpu_ids(self) -> list[str]:
        """Return the ids of all files that are named like ledgers, in byte order.

        Raises :class:`LedgerDirectoryError` if the directory cannot be listed.
        """
        try:
            found = os.listdir(self._fd)
        except OSError as error:  # as when this process has no descriptor left
            message = f"ledger directory {self.path} cannot be listed: {error.strerror}"
            raise LedgerDirectoryError(message, fault_of(error)) from error
        names = [name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX)]
        return sorted(names, key=os.fsencode)

    def open_all(self) -> list[Ledger]:
        """Open every ledger; files that cannot be used are noted in ``refusals`` and passed over."""
        ledgers = []
        for gpu in self.gpu_ids():
            with suppress(LedgerDirectoryError):
                ledgers.append(self.open(gpu))
        return ledgers

    def open(self, gpu: str) -> Ledger:
        """Open one ledger. Raises :class:`LedgerDirectoryError`, and notes the refusal, if it cannot be used."""
        found = self.try_open(gpu, writable=self.writable)
        if isinstance(found, Refusal):
            self.refusals.append(found)
            message = f"ledger {found.path}: {found.reason}"
            raise LedgerDirectoryError(message, found.fault)
        return found

    def try_open(self, gpu: str, *, writable: bool) -> Ledger | Refusal:
        """Open one ledger for writing or for reading only, or return why it cannot be used so."""
        path = f"{self.path}/{gpu}{SUFFIX}"
        try:
            check_gpu_id(gpu)
            handle = binding.Handle(self._fd, gpu + SUFFIX, writable=writable)
        except RefusedLedgerError as error:
            reason = f"{error.reason}{describe(error.file.uid, error.file.mode)}"
            return Refusal(gpu, path, reason, _UNFIT[error.kind])
        except SettingsError as error:
            return Refusal(gpu, path, str(error), Fault.ILLEGAL_NAME)
        except OSError as error:
            return Refusal(gpu, path, f"{error.strerror}{ownership(path)}", fault_of(error))
        problem = self.ownership_problem(handle.file.uid, handle.file.mode) if writable else ""
        if problem:
            handle.close()
            return Refusal(gpu, path, problem, Fault.UNTRUSTED)
        ledger = Ledger(gpu, path, handle, writable=writable)
        self._opened.append(ledger)
        return ledger

    def create(self, gpu: str) -> None:
        """Make the ledger of a GPU if it does not exist. Raises :class:`LedgerDirectoryError`, as on a full disk.

        A directory that its group may write gets ledgers that the group may write, whatever the umask.
        """
        try:
            binding.create_ledger(self._fd, check_gpu_id(gpu) + SUFFIX, self.new_file_mode)
        except OSError as error:
            where = f"{self.path}/{gpu}{SUFFIX}"
            message = f"ledger {where} cannot be created: {error.strerror}; directory{ownership(self.path)}"
            raise LedgerDirectoryError(message) from error

    def set_aside(self, gpu: str, file: FileStatus) -> bool:
        """Rename the ledger of a GPU to ``….damaged`` if it is still ``file``, which its engine saw damaged.

        So that a good one can be made. A file that another release wrote over it is left alone. Returns whether it was
        renamed. Raises :class:`OSError`. Hold the registration lock: another engine on the GPU does the same.
        """
        name = check_gpu_id(gpu) + SUFFIX
        try:
            found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if (found.st_dev, found.st_ino) != (file.device, file.inode) or self._is_of_other_version(name):
            return False
        os.rename(name, name + DAMAGED_SUFFIX, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        return True

    def _is_of_other_version(self, name: str) -> bool:
        try:
            binding.Handle(self._fd, name, writable=False).close()
        except RefusedLedgerError as error:
            return error.kind is Unfit.OTHER_VERSION
        return False

    def sweep(self) -> None:
        """Remove what writers of advice pages that were killed half-way left behind."""
        for name in os.listdir(self._fd):
            if name.startswith(".") and name.endswith(".new") and ADVICE_SUFFIX in name:
                with suppress(OSError):  # another owner's does no harm
                    os.unlink(name, dir_fd=self._fd)

    def ownership_problem(self, uid: int, mode: int) -> str:
        """Return why a file of this owner and mode may not be relied on, or an empty text."""
        if mode & OTHERS_WRITE:
            return f"is writable by everyone{describe(uid, mode)}; remove that permission"
        trusted = {os.geteuid(), 0, self._status.st_uid}
        if uid not in trusted and not self._status.st_mode & GROUP_WRITE:
            return f"belongs to another user{describe(uid, mode)}; remove it"
        return ""
