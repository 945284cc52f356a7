"""Claiming one slot in every member's ledger, all or none, and holding them.

A :class:`Registration` is made and replaced as a whole: when one file is lost, all members register again.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.ledger import binding
from kvcached.ledger.codes import DamagedLedgerError, TableFullError
from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError
from kvcached.settings import check_gpu_id, default_ledger_dir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcached.ledger.contents import FileStatus
    from kvcached.ledger.open_ledger import Ledger
    from kvcached.values import Bound, Identity, Report, Update

LOCK_PATIENCE_S = 0.02
"""How long a registration waits for another one in the same directory before it goes on beside it."""

RIVAL_TRIES = 8
"""How often a registration gives way to another one of the same name that was made at the same moment."""

RIVAL_PAUSE_S = 0.01
"""How long it gives way at most, times the number of the try."""


class InstanceNameTakenError(Exception):
    """A live engine goes by this name already; the message says which."""


class RegistrationError(Exception):
    """The slots could not be claimed now; the message says why and what to do. Trying again later may succeed."""


@dataclass(frozen=True)
class SlotPlace:
    """Where a replica's first slot lies: in which GPU's ledger, at which index, owned by which incarnation."""

    gpu: str
    slot: int
    incarnation: int


class Registration:
    """The slots of one replica: one per member, in byte order of the GPU ids.

    Publishers write the last member last and ring its doorbell: that is the one to listen to.
    """

    def __init__(
        self, identity: Identity, ledgers: Sequence[Ledger], desired: Sequence[Update], report: Report | None = None
    ) -> None:
        """Claim the slots, which begin with these pairs and this report.

        Raises what the native layer raises; closing the ledgers gives up what was claimed.
        """
        self.ledgers = tuple(ledgers)
        self.incarnation = secrets.randbits(64) or 1
        self._slots = [
            ledger.handle.register(identity, member, len(ledgers), self.incarnation, desired, report)
            for member, ledger in enumerate(ledgers)
        ]
        self._agreement = binding.Agreement([ledger.handle for ledger in ledgers])
        self.first_place = SlotPlace(ledgers[0].gpu, self._slots[0], self.incarnation)
        self._last = ledgers[-1].handle

    def agreed(self, bound: Bound) -> Update | None:
        """Return the pair of ``bound`` that all members carry, or None while they differ."""
        return self._agreement.pair(bound)

    def words(self, bound: Bound) -> list[Update | None]:
        """Return each member's own word of ``bound``, None where it is lost; also after :meth:`unregister`."""
        return [
            ledger.handle.desired(slot, self.incarnation, bound)
            for ledger, slot in zip(self.ledgers, self._slots, strict=True)
        ]

    def bell(self) -> int:
        """Return the count of the doorbell; take it before looking for what it announces. Raises :class:`OSError`."""
        return self._last.bell(binding.PUBLISHED)

    def sleep(self, seen: int, deadline: float) -> None:
        """Sleep until the doorbell's count differs from ``seen``, or until ``deadline``. Raises :class:`OSError`."""
        self._last.wait(binding.PUBLISHED, seen, deadline)

    def acknowledge(self, report: Report) -> None:
        """Write ``report`` into all members' slots and ring who waits for it. Raises :class:`OSError`."""
        for ledger in self.ledgers:
            ledger.handle.acknowledge(report)
        self.ledgers[0].handle.ring(binding.ACKNOWLEDGED)

    def faults(self, revisions: Mapping[Bound, int]) -> list[MemberFault]:
        """Return what keeps publishers from reaching this registration, whose words once had ``revisions``."""
        return [fault for ledger in self.ledgers if (fault := _fault_of(ledger, revisions)) is not None]

    def unregister(self) -> None:
        """Give the slots up and wake a thread that sleeps on their doorbell; the words stay readable."""
        for ledger in self.ledgers:
            try:
                ledger.handle.unregister()
            except OSError:
                continue  # its lock is gone already
        self._last.ring(binding.PUBLISHED)

    def close(self) -> None:
        """Close the ledgers; no thread may be in a method of this registration, or call one later."""
        for ledger in self.ledgers:
            ledger.handle.close()


@dataclass(frozen=True)
class MemberFault:
    """Why publishers cannot reach one member of a registration. ``damaged``: the file itself is spoilt."""

    gpu: str
    file: FileStatus
    reason: str
    damaged: bool


def _fault_of(ledger: Ledger, revisions: Mapping[Bound, int]) -> MemberFault | None:
    try:
        reason = ledger.handle.check(ledger.path, revisions)
    except DamagedLedgerError:
        return MemberFault(ledger.gpu, ledger.handle.file, "was truncated or overwritten", damaged=True)
    except OSError:
        return None  # it could not be looked at, which says nothing about the file
    return None if reason is None else MemberFault(ledger.gpu, ledger.handle.file, reason, damaged=False)


@dataclass(frozen=True)
class Beginning:
    """What a registration begins with: a pair for each bound, and the first report, None before the engine made one."""

    desired: tuple[Update, ...]
    report: Report | None = None


def register(
    identity: Identity,
    gpu_ids: Sequence[str],
    ledger_dir: str,
    beginning: Beginning,
    damaged: Sequence[MemberFault] = (),
) -> Registration:
    """Register a replica in the ledgers of all its GPUs, making directory and files where they are missing.

    Files that were ``damaged`` under this engine are set aside first, if nobody else did that already.

    Raises:
        InstanceNameTakenError: a live engine has this name and replica.
        RegistrationError: the directory, a file in it or a full table prevents it.

    """
    gpus = sorted({check_gpu_id(gpu) for gpu in gpu_ids}, key=os.fsencode)
    rival = ""
    for attempt in range(RIVAL_TRIES):
        if attempt > 0:
            time.sleep(secrets.SystemRandom().uniform(0, attempt * RIVAL_PAUSE_S))
        try:
            return _register_once(identity, gpus, ledger_dir, beginning, damaged)
        except _RivalError as error:
            rival = str(error)
        except (LedgerDirectoryError, binding.NativeLibraryError) as error:
            raise RegistrationError(str(error)) from error
        except OSError as error:
            raise RegistrationError(_explain(error, ledger_dir)) from error
    raise InstanceNameTakenError(rival)


def _explain(error: OSError, ledger_dir: str) -> str:
    if error.errno in _NO_LOCKS:
        return (
            f"file locks do not work on {ledger_dir}: {error.strerror}; this sandbox or file system needs "
            "fcntl(F_OFD_SETLK), or give the engine another ledger directory"
        )
    return str(error)


_NO_LOCKS = frozenset({errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP})


class _RivalError(Exception):
    """Another registration of the same name was made at the same moment."""


def _register_once(
    identity: Identity, gpus: Sequence[str], ledger_dir: str, beginning: Beginning, damaged: Sequence[MemberFault]
) -> Registration:
    with LedgerDirectory(ledger_dir, writable=True, create=_may_create(ledger_dir)) as directory:
        directory.lock(time.monotonic() + LOCK_PATIENCE_S)
        try:
            for fault in damaged:
                directory.set_aside(fault.gpu, fault.file)
            return _register_in(identity, gpus, directory, beginning)
        finally:
            directory.unlock()


def _may_create(ledger_dir: str) -> bool:
    """Return whether a missing directory is made: not below a missing parent, which may be a mount to come."""
    parent = os.path.dirname(ledger_dir)
    return ledger_dir == default_ledger_dir() or os.path.isdir(parent)


def _register_in(
    identity: Identity, gpus: Sequence[str], directory: LedgerDirectory, beginning: Beginning
) -> Registration:
    directory.sweep()
    holder = _find_holder(identity, directory, apart_from=0)
    if holder is not None:
        raise InstanceNameTakenError(holder)
    for gpu in gpus:
        directory.create(gpu)
    ledgers = [directory.open(gpu) for gpu in gpus]
    try:
        registration = Registration(identity, ledgers, beginning.desired, beginning.report)
    except TableFullError as error:
        message = f"a ledger in {directory.path} is full, {error}; stop some of them or use another ledger directory"
        raise RegistrationError(message) from error
    # Another one may have looked at the same moment, and found nobody as well. Who looks after registering finds all
    # that registered before; closing the directory gives the slots up again.
    rival = _find_holder(identity, directory, apart_from=registration.incarnation)
    if rival is not None:
        raise _RivalError(rival)
    for ledger in ledgers:
        directory.detach(ledger)
    return registration


def _find_holder(identity: Identity, directory: LedgerDirectory, *, apart_from: int) -> str | None:
    """Return a sentence about a live engine that has this name and replica, unless it is incarnation ``apart_from``."""
    for ledger in directory.open_all():
        for _, slot in ledger.handle.live_slots():
            other = slot.identity
            same = (other.instance_name, other.replica) == (identity.instance_name, identity.replica)
            if same and slot.incarnation != apart_from:
                return (
                    f"instance {other.instance_name!r} (replica {other.replica}) is already running: {other.engine} "
                    f"with pid {slot.pid} is registered in {ledger.path}; stop it or set another KVCACHED_INSTANCE_NAME"
                )
    return None
