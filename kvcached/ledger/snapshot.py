"""One look at a ledger directory, as a value: which files can be used and how, who is alive in them, what was not seen.

Everything that reads a directory starts from here, so that all commands and the API answer alike. Looking changes
nothing and raises nothing: what keeps one from looking is part of the answer, since "nobody is there" and "could not
look" are different answers.
"""

from __future__ import annotations

import enum
from contextlib import contextmanager

from kvcached.ledger.directory import Fault, LedgerDirectory, LedgerDirectoryError, Refusal
from kvcached.ledger.replicas import Member, find_conflict, group_members, is_legal
from kvcached.light_dataclasses import dataclass

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.ledger.open_ledger import Ledger
    from kvcached.ledger.replicas import Replica


class FileState(enum.Enum):
    """What one may do with a ledger file. READ_ONLY is only told of a directory that was opened for writing."""

    USABLE = "usable"
    READ_ONLY = "read-only for you"
    REFUSED = "refused"
    ABSENT = "absent"  # it was listed, and gone when it was opened


@dataclass(frozen=True)
class FileLook:
    """One file that is named like a ledger. ``ledger`` is open as long as its directory is, and None if refused.

    ``reason`` says why it is not usable, and ``fault`` of which kind that is.
    """

    gpu: str
    path: str
    state: FileState
    reason: str = ""
    fault: Fault | None = None
    ledger: Ledger | None = None
    members: tuple[Member, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """A ledger directory at one moment.

    ``fault`` and ``reason`` are None and empty if the directory itself could be read; then ``files`` holds every file
    that is named like a ledger, and ``replicas`` whoever is alive in them, under a name that an instance can have.
    """

    path: str
    files: tuple[FileLook, ...] = ()
    replicas: tuple[Replica, ...] = ()
    strangers: tuple[Refusal, ...] = ()
    reason: str = ""
    fault: Fault | None = None

    @property
    def names(self) -> list[str]:
        """The names of the live instances, sorted. All of them are legal."""
        return sorted({replica.slot.identity.instance_name for replica in self.replicas})

    @property
    def conflict(self) -> str | None:
        """A sentence if two live engines claim to be the same replica."""
        return find_conflict(self.replicas)

    def of(self, instance_name: str) -> Snapshot:
        """Return the same look with the replicas of one instance only."""
        mine = tuple(one for one in self.replicas if one.slot.identity.instance_name == instance_name)
        return Snapshot(self.path, self.files, mine, self.strangers, self.reason, self.fault)

    @property
    def ledgers(self) -> list[Ledger]:
        """The open ledgers, in byte order of their GPU ids."""
        return [look.ledger for look in self.files if look.ledger is not None]

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What in the directory is not used, and why: files, and slots whose name no instance can have."""
        refused = [look for look in self.files if look.state is FileState.REFUSED]
        files = (Refusal(look.gpu, look.path, look.reason, look.fault or Fault.UNKNOWN) for look in refused)
        return (*files, *self.strangers)

    @property
    def read_only(self) -> tuple[FileLook, ...]:
        """The ledgers that may be read and not written, which no publication can reach from here."""
        return tuple(look for look in self.files if look.state is FileState.READ_ONLY)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Why live engines may be here all the same: the directory, or files in it, that could not be looked at."""
        if self.fault is not None and self.fault is not Fault.ABSENT:
            return (self.reason,)
        hidden = (Fault.FORBIDDEN, Fault.SHORTAGE, Fault.UNKNOWN)
        return tuple(f"{look.path}: {look.reason}" for look in self.files if look.fault in hidden and not look.ledger)


def unwritable(replica: Replica, snapshot: Snapshot) -> list[str]:
    """Return a sentence for each member of ``replica`` that may be read and not written from here."""
    mine = {member.ledger.gpu for member in replica.members}
    return [f"{look.path} is read-only for you: {look.reason}" for look in snapshot.read_only if look.gpu in mine]


@contextmanager
def open_snapshot(path: str, *, writable: bool = False) -> Iterator[Snapshot]:
    """Look at a directory; the ledgers in the snapshot stay open while the context lasts.

    Raises :class:`NativeLibraryError` alone: a directory that cannot be opened is a snapshot with a ``reason``.

    Args:
        path: The directory.
        writable: Whether ledgers will be written. A directory that may not be trusted is then a ``reason``, and files
            that may only be read are told apart.

    """
    try:
        directory = LedgerDirectory(path, writable=writable)
    except LedgerDirectoryError as error:
        yield Snapshot(path, reason=str(error), fault=error.fault)
        return
    with directory:
        yield look_at(directory)


def take_snapshot(path: str, *, writable: bool = False) -> Snapshot:
    """Look at a directory once; the ledgers in the snapshot are closed, and only what was read of them is there."""
    with open_snapshot(path, writable=writable) as snapshot:
        return snapshot


def look_at(directory: LedgerDirectory) -> Snapshot:
    """Look at a directory that is open; the ledgers in the snapshot are closed with it."""
    try:
        gpus = directory.gpu_ids()
    except LedgerDirectoryError as error:
        return Snapshot(directory.path, reason=str(error), fault=error.fault)
    return look_again(directory.path, [_open(directory, gpu) for gpu in gpus])


def look_again(path: str, files: list[FileLook] | tuple[FileLook, ...]) -> Snapshot:
    """Read the open ones of these files again: which slots are alive now, and what they say."""
    looks = tuple(_read(look) for look in files)
    members = [member for look in looks for member in look.members]
    strangers = tuple(_stranger(member) for member in members if not is_legal(member))
    return Snapshot(path, looks, tuple(group_members(filter(is_legal, members))), strangers)


def is_unchanged(directory: LedgerDirectory, snapshot: Snapshot) -> bool:
    """Return whether a directory still holds the files of a look, whole; one that was refused may be well by now.

    Raises :class:`LedgerDirectoryError` if the directory cannot be read.
    """
    if any(look.ledger is None for look in snapshot.files) or not directory.is_current():
        return False
    return directory.gpu_ids() == [look.gpu for look in snapshot.files] and all(
        ledger.is_current() for ledger in snapshot.ledgers
    )


def _open(directory: LedgerDirectory, gpu: str) -> FileLook:
    found = directory.try_open(gpu, writable=directory.writable)
    if not isinstance(found, Refusal):
        return FileLook(gpu, found.path, FileState.USABLE, ledger=found)
    if found.fault is Fault.FORBIDDEN and directory.writable:
        readable = directory.try_open(gpu, writable=False)
        if not isinstance(readable, Refusal):
            return FileLook(gpu, found.path, FileState.READ_ONLY, found.reason, found.fault, readable)
    state = FileState.ABSENT if found.fault is Fault.ABSENT else FileState.REFUSED
    return FileLook(gpu, found.path, state, found.reason, found.fault)


def _read(look: FileLook) -> FileLook:
    if look.ledger is None:
        return look
    try:
        slots = look.ledger.handle.live_slots()
    except OSError as error:
        # An error is no answer: whoever owns a slot here may well be alive.
        reason = f"cannot tell which engines are alive: {error.strerror} (file locks may be missing in this sandbox)"
        return FileLook(look.gpu, look.path, FileState.REFUSED, reason, Fault.UNKNOWN)
    members = tuple(Member(look.ledger, index, slot) for index, slot in slots)
    return FileLook(look.gpu, look.path, look.state, look.reason, look.fault, look.ledger, members)


def _stranger(member: Member) -> Refusal:
    name = ascii(member.slot.identity.instance_name)
    reason = f"slot {member.index} is ignored: {name} is not a valid instance name"
    return Refusal(member.ledger.gpu, member.ledger.path, reason, Fault.ILLEGAL_NAME)
