"""The only module that knows cffi: it opens ``libkvledger.so`` and turns its codes into values and exceptions.

Everything here mirrors ``native/kvledger.h``, which is the contract; nothing here decides anything.
"""

from __future__ import annotations

import enum
import errno
import os
import sys
import time
from dataclasses import dataclass

from kvcached.errors import KvcachedError
from kvcached.values import Identity, Outcome, Report, Update, pack, unpack

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

LIBRARY_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libkvledger.so")

PUBLISHED = 0
"""The doorbell that publishers ring."""
ACKNOWLEDGED = 1
"""The doorbell that engines ring."""


class NativeLibraryError(KvcachedError):
    """The native library cannot be used: it is missing, was built for another platform, or does not fit."""


class Unfit(enum.Enum):
    """Why a file is not a ledger that may be used: no such thing, one that was spoilt, or one of other software."""

    NO_LEDGER = "no ledger"
    DAMAGED = "damaged"
    OTHER_VERSION = "of another version"


class RefusedLedgerError(Exception):
    """A file is not a ledger that may be used. ``reason`` is one sentence; ``file`` says what was found."""

    def __init__(self, reason: str, file: FileStatus, kind: Unfit) -> None:
        super().__init__(reason)
        self.reason = reason
        self.file = file
        self.kind = kind


class TableFullError(Exception):
    """All slots of a ledger belong to live engines."""


@dataclass(frozen=True)
class FileStatus:
    """A ledger file's identity and permissions; ``mode`` as in ``os.stat_result``."""

    device: int
    inode: int
    size: int
    links: int
    uid: int
    gid: int
    mode: int
    abi: int


@dataclass(frozen=True)
class Slot:
    """One live slot as it stands in the file; times are nanoseconds since the epoch.

    ``consistent`` is False when the owner stopped in mid-report: its figures may then belong to two reports.
    """

    incarnation: int
    desired: Update
    registered_ns: int
    identity: Identity
    member: int
    members: int
    pid: int
    report: Report
    reported_ns: int
    consistent: bool


@dataclass(frozen=True)
class AuditRecord:
    """One publication as its publisher recorded it; the time is nanoseconds since the epoch."""

    when_ns: int
    before: Update
    after: Update
    uid: int
    pid: int
    instance_name: str
    program: str
    note: str


_OUTCOMES = tuple(Outcome)
_OUTCOME_CODES = {outcome: code for code, outcome in enumerate(_OUTCOMES)}


class _Library:
    """The opened library and its cffi declarations."""

    def __init__(self) -> None:
        try:
            from kvcached._declarations import ffi  # noqa: PLC0415 - on first use, so that `doctor` can report it
        except ImportError as error:
            raise NativeLibraryError(_not_built(error)) from error
        self.ffi: Any = ffi
        try:
            self.lib: Any = ffi.dlopen(LIBRARY_PATH)
        except OSError as error:
            message = f"native library {LIBRARY_PATH} does not load here: {error}; reinstall kvcached-control"
            raise NativeLibraryError(message) from error
        self._check_fit()

    def _check_fit(self) -> None:
        names = ("file", "identity", "report", "slot", "audit")
        sizes = [self.ffi.sizeof(f"struct kvl_{name}") for name in names]
        if self.lib.kvl_check_abi(self.lib.KVL_ABI, *sizes) != 0:
            message = (
                f"native library {LIBRARY_PATH} is of another version than this package; reinstall kvcached-control"
            )
            raise NativeLibraryError(message)


def _not_built(error: ImportError) -> str:
    """Say what to do where the generated declarations are missing; a source checkout is the usual place."""
    root = os.path.dirname(os.path.dirname(LIBRARY_PATH))
    if os.path.exists(os.path.join(root, "setup.py")):
        return (
            f"{root} is a source checkout in which nothing was built, and hides an installed package: "
            f"run from another folder, or build it in place with pip install -e {root}"
        )
    return f"the native part of kvcached-control was not built ({error}); install it with pip, which compiles it"


_library: _Library | None = None


def _load() -> _Library:
    global _library  # noqa: PLW0603 - one library per process, opened on first use
    if _library is None:
        _library = _Library()
    return _library


def binding_version() -> str:
    """Return the version of cffi's runtime. Raises :class:`NativeLibraryError` if it is not installed."""
    try:
        import _cffi_backend  # noqa: PLC0415 - its absence is an answer
    except ImportError as error:
        message = f"cffi's runtime is not installed ({error}); pip install cffi"
        raise NativeLibraryError(message) from error
    return str(getattr(_cffi_backend, "__version__", "of unknown version"))


def layout() -> int:
    """Return the layout fingerprint of the library. Raises :class:`NativeLibraryError` if it does not load."""
    return int(_load().lib.kvl_layout())


def guard_mappings() -> None:
    """Make sure that a truncated ledger does not end this process, whoever set signal handlers meanwhile."""
    _check(_load().lib.kvl_guard(), "SIGBUS")


def create_ledger(directory_fd: int, name: str, mode: int) -> bool:
    """Make a ledger file whole; False if the name was taken. Raises :class:`OSError`, as on a full file system."""
    return bool(_check(_load().lib.kvl_create(directory_fd, name.encode(), mode), name))


class Handle:
    """An open ledger. Methods mirror the ``kvl_`` functions of the same name; see ``kvledger.h`` for their promises."""

    def __init__(self, directory_fd: int, name: str, *, writable: bool) -> None:
        """Open ``name`` in a directory. Raises :class:`RefusedLedgerError` or :class:`OSError`."""
        library = _load()
        self._ffi, self._lib = library.ffi, library.lib
        status = self._ffi.new("struct kvl_file *")
        out = self._ffi.new("kvl_ledger **")
        code = self._lib.kvl_open(directory_fd, name.encode(), writable, status, out)
        self.file = FileStatus(
            status.device, status.inode, status.size, status.links, status.uid, status.gid, status.mode, status.abi
        )
        refusal = self._refusal(code)
        if refusal is not None:
            kind, reason = refusal
            raise RefusedLedgerError(reason, self.file, kind)
        _check(code, name)
        self._ledger = out[0]

    def _refusal(self, code: int) -> tuple[Unfit, str] | None:
        lib, links, size = self._lib, self.file.links, self.file.size
        version = f"has ledger version {self.file.abi}; this library knows version {lib.KVL_ABI}"
        return {
            lib.KVL_E_NOT_REGULAR: (Unfit.NO_LEDGER, "not a regular file"),
            lib.KVL_E_HARD_LINKED: (Unfit.NO_LEDGER, f"has {links} names (hard links); a ledger has one"),
            lib.KVL_E_SIZE: (Unfit.DAMAGED, f"is {size} bytes long; a ledger has {lib.KVL_FILE_BYTES}"),
            lib.KVL_E_MAGIC: (Unfit.DAMAGED, "holds no ledger (wrong magic number)"),
            lib.KVL_E_BYTE_ORDER: (Unfit.OTHER_VERSION, "was written by a machine of the other byte order"),
            lib.KVL_E_ABI: (Unfit.OTHER_VERSION, version),
            lib.KVL_E_LAYOUT: (Unfit.OTHER_VERSION, f"has ledger version {lib.KVL_ABI}, but another layout of it"),
        }.get(code)

    def release(self) -> None:
        """Give all locks up; what was mapped stays readable."""
        self._lib.kvl_release(self._ledger)

    def close(self) -> None:
        """Release and unmap; words obtained from this handle may not be read afterwards. May be called twice."""
        self._lib.kvl_close(self._ledger)
        self._ledger = self._ffi.NULL

    def register(self, identity: Identity, member: int, members: int, incarnation: int, desired: Update) -> int:
        """Claim a slot and write who owns it; the index. Raises :class:`TableFullError` or :class:`OSError`."""
        raw = self._ffi.new("struct kvl_identity *")
        raw.instance = identity.instance_name.encode()
        raw.engine = _cut(identity.engine, self._lib.KVL_ENGINE_BYTES)
        raw.version = _cut(identity.engine_version, self._lib.KVL_VERSION_BYTES)
        raw.replica, raw.member, raw.members = identity.replica, member, members
        raw.tp_size, raw.pp_size = identity.tp_size, identity.pp_size
        raw.startup_limit, raw.block_tokens = identity.startup_limit_tokens, identity.block_tokens
        raw.pid = os.getpid()
        code = self._lib.kvl_register(self._ledger, raw, incarnation, pack(desired))
        if code == -errno.EUSERS:
            message = f"all {self._lib.KVL_SLOTS} slots belong to live engines"
            raise TableFullError(message)
        return _check(code, "register")

    def unregister(self, index: int) -> None:
        """Give a slot back."""
        _check(self._lib.kvl_unregister(self._ledger, index), "unregister")

    def live_slots(self) -> list[tuple[int, Slot]]:
        """Return the live slots with their indices. Raises :class:`OSError` where it cannot be told who is alive."""
        slots = ((index, self.read_slot(index)) for index in range(self._lib.KVL_SLOTS))
        return [(index, slot) for index, slot in slots if slot is not None]

    def read_slot(self, index: int) -> Slot | None:
        """Return one slot, or None if nobody owns it. Raises :class:`OSError` where that cannot be told."""
        raw = self._ffi.new("struct kvl_slot *")
        code = self._lib.kvl_read_slot(self._ledger, index, raw)
        # A slot that kept changing, or a handle that was released, shows nobody. Any other error is no answer.
        if code not in (-errno.EAGAIN, -errno.EBADF):
            _check(code, "locks")
        return self._slot_of(raw) if code == 1 else None

    def _slot_of(self, raw: Any) -> Slot:
        return Slot(
            incarnation=raw.incarnation,
            desired=unpack(raw.desired),
            registered_ns=raw.registered_ns,
            identity=self._identity_of(raw.identity),
            member=raw.identity.member,
            members=raw.identity.members,
            pid=raw.identity.pid,
            report=self._report_of(raw.report),
            reported_ns=raw.report.reported_ns,
            consistent=bool(raw.report.consistent),
        )

    def _identity_of(self, raw: Any) -> Identity:
        return Identity(
            instance_name=self._text(raw.instance),
            engine=self._text(raw.engine),
            engine_version=self._text(raw.version),
            replica=raw.replica,
            tp_size=raw.tp_size,
            pp_size=raw.pp_size,
            startup_limit_tokens=raw.startup_limit,
            block_tokens=raw.block_tokens,
        )

    def _report_of(self, raw: Any) -> Report:
        return Report(
            applied=unpack(raw.applied),
            settled_revision=raw.settled_revision,
            # A peer may have written any number.
            outcome=_OUTCOMES[raw.outcome] if raw.outcome < len(_OUTCOMES) else Outcome.STARTUP,
            reason=self._text(raw.reason),
            idle_tokens=raw.idle,
            active_tokens=raw.active,
            capacity_tokens=raw.capacity,
            evicted_tokens=raw.evicted,
            eviction_errors=raw.eviction_errors,
        )

    def _text(self, field: Any) -> str:
        """Decode a field that a peer may have filled with anything, also with commands for the reader's terminal."""
        text = str(self._ffi.string(field).decode(errors="replace"))
        return text if text.isprintable() else "".join(mark if mark.isprintable() else "\ufffd" for mark in text)

    def is_owned(self, index: int, incarnation: int) -> bool:
        """Return whether ``incarnation`` still owns the slot."""
        return bool(self._lib.kvl_is_owned(self._ledger, index, incarnation))

    def raise_desired(self, index: int, incarnation: int, update: Update) -> tuple[bool, Update]:
        """Publish ``update`` if its revision is higher; return whether it was, and the pair found.

        Raises :class:`ProcessLookupError` if ``incarnation`` does not own the slot any more.
        """
        found = self._ffi.new("uint64_t *")
        code = _check(self._lib.kvl_raise(self._ledger, index, incarnation, pack(update), found), "raise")
        return code == self._lib.KVL_RAISED, unpack(found[0])

    def acknowledge(self, index: int, report: Report) -> None:
        """Write a report into a slot of one's own. Raises :class:`OSError` after a fork."""
        raw = self._ffi.new("struct kvl_report *")
        raw.applied, raw.settled_revision = pack(report.applied), report.settled_revision
        raw.outcome = _OUTCOME_CODES[report.outcome]
        raw.idle, raw.active = report.idle_tokens, report.active_tokens
        raw.capacity, raw.evicted = report.capacity_tokens, report.evicted_tokens
        raw.eviction_errors = report.eviction_errors
        raw.reason = _cut(report.reason, self._lib.KVL_REASON_BYTES)
        _check(self._lib.kvl_acknowledge(self._ledger, index, raw), "acknowledge")

    def desired_word(self, index: int) -> Word:
        """Return the place of a desired word; it may be read until the handle is closed."""
        return Word(self, self._lib.kvl_desired_word(self._ledger, index))

    def audit(self, record: AuditRecord) -> None:
        """Append a publication to the file's bounded record."""
        raw = self._ffi.new("struct kvl_audit *")
        raw.when_ns, raw.before, raw.after = record.when_ns, pack(record.before), pack(record.after)
        raw.uid, raw.pid = record.uid, record.pid
        raw.instance = record.instance_name.encode()
        raw.program = _cut(record.program, self._lib.KVL_PROGRAM_BYTES)
        raw.note = _cut(record.note, self._lib.KVL_NOTE_BYTES)
        _check(self._lib.kvl_audit_write(self._ledger, raw), "audit")

    def audits(self) -> list[AuditRecord]:
        """Return the recorded publications, newest first, without those that were overwritten half-way."""
        raw = self._ffi.new("struct kvl_audit *")
        indices = range(self._lib.KVL_AUDIT_RECORDS)
        return [self._audit_of(raw) for index in indices if self._lib.kvl_audit_read(self._ledger, index, raw) == 1]

    def _audit_of(self, raw: Any) -> AuditRecord:
        return AuditRecord(
            when_ns=raw.when_ns,
            before=unpack(raw.before),
            after=unpack(raw.after),
            uid=raw.uid,
            pid=raw.pid,
            instance_name=self._text(raw.instance),
            program=self._text(raw.program),
            note=self._text(raw.note),
        )

    def bell(self, bell: int) -> int:
        """Return a doorbell's count; take it before looking for what it announces."""
        return int(self._lib.kvl_bell(self._ledger, bell))

    def ring(self, bell: int) -> None:
        """Ring a doorbell."""
        self._lib.kvl_ring(self._ledger, bell)

    def wait(self, bell: int, seen: int, deadline: float) -> bool:
        """Sleep until the bell's count differs from ``seen``, or until ``time.monotonic()`` reaches ``deadline``.

        Returns whether it rang. Runs Python's signal handlers when interrupted, and releases the interpreter lock.
        """
        deadline_ns = int(min(deadline, _FAR_FUTURE) * 1e9)
        while True:
            code = self._lib.kvl_wait(self._ledger, bell, seen, deadline_ns)
            if code == 0:
                return True
            if code != -errno.EINTR or time.monotonic() >= deadline:
                return False

    def is_lost(self) -> bool:
        """Return whether the file was truncated under the mapping."""
        return bool(self._lib.kvl_is_lost(self._ledger))


_FAR_FUTURE = float(2**33)  # seconds; what a wait without end sleeps until


class Word:
    """Where a desired word stands. Keeps its handle's mapping from being collected."""

    def __init__(self, handle: Handle, pointer: Any) -> None:
        self.handle = handle
        self.pointer = pointer

    def value(self) -> int:
        """Return the word as it stands, also that of a slot which nobody owns."""
        return int(self.pointer[0])

    def revision_view(self) -> memoryview:
        """Return a view whose item 0 is the word's revision: the hot look, one aligned load without a call.

        Half the word is enough, because words are only ever raised; and a small integer is cheaper than a large one.
        """
        upper_half = slice(4, 8) if sys.byteorder == "little" else slice(0, 4)
        return memoryview(_load().ffi.buffer(self.pointer, 8))[upper_half].cast("I").toreadonly()


class Agreement:
    """Compares the desired words of all members of a replica in one call."""

    def __init__(self, words: Sequence[Word]) -> None:
        library = _load()
        self._agree = library.lib.kvl_agree
        self._words = library.ffi.new("uint64_t *[]", [word.pointer for word in words])
        self._keep = tuple(words)
        self._count = len(words)
        self._out = library.ffi.new("uint64_t *")

    def pair(self) -> Update | None:
        """Return the pair that stands in all members, or None while they differ."""
        if self._agree(self._words, self._count, self._out) == 1:
            return unpack(self._out[0])
        return None


def _check(code: int, subject: str) -> int:
    """Turn a negated errno into the :class:`OSError` it stands for."""
    if code < 0:
        raise OSError(-code, os.strerror(-code), subject)
    return code


def _cut(text: str, capacity: int) -> bytes:
    """Encode ``text`` for a field of ``capacity`` bytes with its end mark, without leaving half a character.

    A program's name or an engine's message may hold what cannot be encoded, and must not stop a report.
    """
    return text.encode(errors="replace")[: capacity - 1].decode(errors="ignore").encode()
