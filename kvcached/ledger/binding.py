"""The only module that knows cffi: it opens ``libkvledger.so`` and turns its codes into values and exceptions.

Everything here mirrors ``native/kvledger.h``, which is the contract; nothing here decides anything.
"""

from __future__ import annotations

import errno
import math
import os
import time

from kvcached.errors import KvcachedError
from kvcached.ledger.codes import TableFullError, checked, loss_of, refusal_of
from kvcached.ledger.structs import BOUND_CODES, Structs
from kvcached.values import Bound, pack, unpack

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from kvcached.ledger.contents import AuditRecord, Slot
    from kvcached.values import Identity, Report, Update

LIBRARY_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libkvledger.so")

PUBLISHED = 0
"""The doorbell that publishers ring."""
ACKNOWLEDGED = 1
"""The doorbell that engines ring."""


class NativeLibraryError(KvcachedError):
    """The native library cannot be used: it is missing, was built for another platform, or does not fit."""


class _Library:
    """The opened library and its cffi declarations."""

    def __init__(self) -> None:
        try:
            # On first use, so that `doctor` can report it.
            from kvcached.ledger._declarations import ffi  # noqa: PLC0415
        except ImportError as error:
            raise NativeLibraryError(_not_built(error)) from error
        self.ffi: Any = ffi
        try:
            self.lib: Any = ffi.dlopen(LIBRARY_PATH)
        except OSError as error:
            message = f"native library {LIBRARY_PATH} does not load here: {error}; reinstall kvcached-control"
            raise NativeLibraryError(message) from error
        self.structs = Structs(ffi, self.lib)
        self._check_fit()

    def _check_fit(self) -> None:
        names = ("file", "identity", "report", "slot", "audit")
        sizes = [self.ffi.sizeof(f"struct kvl_{name}") for name in names]
        if self.lib.kvl_check_abi(self.lib.KVL_ABI, *sizes) != 0:
            message = (
                f"native library {LIBRARY_PATH} does not match the version of this package; reinstall kvcached-control"
            )
            raise NativeLibraryError(message)


def _not_built(error: ImportError) -> str:
    """Say what to do where the generated declarations are missing; a source checkout is the usual place."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(LIBRARY_PATH)))
    if os.path.exists(os.path.join(root, "setup.py")):
        return (
            f"{root} is a source checkout without a build, and hides an installed package: "
            f"run from another folder, or build it with pip install -e {root}"
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


def library_version() -> str:
    """Return what the library calls itself. Raises :class:`NativeLibraryError` if it does not load."""
    lib = _load().lib
    return f"interface {lib.KVL_ABI}, ledger version {lib.KVL_FORMAT}"


def create_ledger(directory_fd: int, name: str, mode: int) -> bool:
    """Make a ledger file whole; False if the name was taken. Raises :class:`OSError`, as on a full file system."""
    return bool(checked(_load().lib.kvl_create(directory_fd, name.encode(), mode), name))


class Handle:
    """An open ledger. Methods mirror the ``kvl_`` functions of the same name; see ``kvledger.h`` for their promises."""

    def __init__(self, directory_fd: int, name: str, *, writable: bool) -> None:
        """Open ``name`` in a directory. Raises :class:`RefusedLedgerError` or :class:`OSError`."""
        library = _load()
        self._ffi, self._lib, self._structs = library.ffi, library.lib, library.structs
        self._pointer: Any = None
        status = self._ffi.new("struct kvl_file *")
        out = self._ffi.new("kvl_ledger **")
        code = self._lib.kvl_open(directory_fd, name.encode(), writable, status, out)
        self.file = self._structs.file_status(status)
        refusal = refusal_of(self._lib, code, self.file)
        if refusal is not None:
            raise refusal
        checked(code, name)
        self._pointer = out[0]

    @property
    def _ledger(self) -> Any:
        if self._pointer is None:
            message = "this ledger was closed"
            raise ValueError(message)
        return self._pointer

    def close(self) -> None:
        """Close the file, which ends its locks. May be called twice; other methods raise ValueError afterwards."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._lib.kvl_close(pointer)

    def check(self, path: str, revisions: Mapping[Bound, int] | None = None) -> str | None:
        """Return why publishers cannot reach what is open here, or None if ``path`` still leads to it, whole.

        For a handle that registered a slot, the registration is looked at as well; ``revisions`` are those that its
        words had before. Raises :class:`DamagedLedgerError` for a file that was cut or overwritten, and another
        :class:`OSError` if it could not be looked at, which says neither.
        """
        once = [0 if revisions is None else revisions.get(bound, 0) for bound in Bound]
        code = self._lib.kvl_check(self._ledger, _AT_FDCWD, os.fsencode(path), self._ffi.new("uint32_t[]", once))
        reason = loss_of(self._lib, code)
        if reason is None:
            checked(code, path)
        return reason

    def register(
        self,
        identity: Identity,
        member: int,
        members: int,
        incarnation: int,
        desired: Sequence[Update] = (),
        report: Report | None = None,
    ) -> int:
        """Claim a slot and write who owns it; the index. Raises :class:`TableFullError` or :class:`OSError`.

        The slot begins with the ``desired`` pairs, and with the identity's startup value where a bound has none there;
        and with ``report``, so that nobody sees it without.
        """
        raw = self._structs.new_identity(identity, member, members)
        pairs = {bound: identity.startup(bound) for bound in Bound} | {pair.bound: pair for pair in desired}
        words = self._ffi.new("uint64_t[]", [pack(pairs[bound]) for bound in Bound])
        first = self._ffi.NULL if report is None else self._structs.new_report(report)
        code = self._lib.kvl_register(self._ledger, raw, incarnation, words, first)
        if code == -errno.EUSERS:
            message = f"all {self.slots} slots belong to live engines"
            raise TableFullError(message)
        return checked(code, "register")

    def unregister(self) -> None:
        """Stop owning the slot; it stays readable here, and is free for others after :meth:`close`."""
        checked(self._lib.kvl_unregister(self._ledger), "unregister")

    def live_slots(self) -> list[tuple[int, Slot]]:
        """Return the live slots with their indices. Raises :class:`OSError` where it cannot be told who is alive."""
        raw = self._ffi.new("struct kvl_slot *")
        slots = ((index, self._read_slot(index, raw)) for index in range(self.slots))
        return [(index, slot) for index, slot in slots if slot is not None]

    def read_slot(self, index: int) -> Slot | None:
        """Return one slot, or None if nobody owns it. Raises :class:`OSError` if that cannot be found out."""
        return self._read_slot(index, self._ffi.new("struct kvl_slot *"))

    def _read_slot(self, index: int, raw: Any) -> Slot | None:
        code = self._lib.kvl_read_slot(self._ledger, index, raw)
        if code == -errno.EAGAIN:  # written to without a pause, which no engine does: not to be read
            return None
        checked(code, "whether a slot is alive")
        return None if code == self._lib.KVL_DEAD else self._structs.slot(raw, whole=code == self._lib.KVL_ALIVE)

    @property
    def slots(self) -> int:
        """How many slots a ledger has."""
        return int(self._lib.KVL_SLOTS)

    def is_blank(self, index: int) -> bool:
        """Return whether no engine ever registered in this slot."""
        word = self._ffi.new("uint64_t *")
        return bool(self._lib.kvl_desired(self._ledger, index, 0, BOUND_CODES[Bound.LIMIT], word) == 0)

    def desired(self, index: int, incarnation: int, bound: Bound = Bound.LIMIT) -> Update | None:
        """Return the desired pair of a slot that carries ``incarnation``, alive or not; None if another or lost."""
        word = self._ffi.new("uint64_t *")
        code = self._lib.kvl_desired(self._ledger, index, incarnation, BOUND_CODES[bound], word)
        return unpack(word[0], bound) if code == 0 else None

    def is_owned(self, index: int, incarnation: int) -> bool:
        """Return whether ``incarnation`` still owns the slot. Raises :class:`OSError` if that cannot be found out."""
        return checked(self._lib.kvl_is_owned(self._ledger, index, incarnation), "whether a slot is owned") == 1

    def raise_desired(
        self, index: int, incarnation: int, update: Update, record: AuditRecord | None = None, *, floor: int = 0
    ) -> tuple[bool, Update]:
        """Publish ``update`` if its revision is above its bound's; return whether it was, and the pair found.

        ``record`` is appended to the file's record, with the pairs before and after filled in. ``floor`` is a revision
        that was read there before. Raises :class:`ProcessLookupError` if ``incarnation`` does not own the slot any
        more, and :class:`DamagedLedgerError` if the word went back below ``floor``.
        """
        found = self._ffi.new("uint64_t *")
        raw = self._ffi.NULL if record is None else self._structs.new_audit(record)
        bound, word = BOUND_CODES[update.bound], pack(update)
        code = self._lib.kvl_raise(self._ledger, index, incarnation, bound, word, floor, raw, found)
        return checked(code, "raise") == self._lib.KVL_RAISED, unpack(found[0], update.bound)

    def acknowledge(self, report: Report) -> None:
        """Write a report into the slot that this handle registered. Raises :class:`OSError` after a fork."""
        checked(self._lib.kvl_acknowledge(self._ledger, self._structs.new_report(report)), "acknowledge")

    def audit(self, record: AuditRecord) -> None:
        """Append to the file's bounded record of publications."""
        checked(self._lib.kvl_audit_write(self._ledger, self._structs.new_audit(record)), "audit")

    def audits(self) -> list[AuditRecord]:
        """Return the recorded publications, newest first, without those that were not written whole."""
        raw = self._ffi.new("struct kvl_audit[]", self._lib.KVL_AUDIT_RECORDS)
        written = self._ffi.new("uint64_t *")
        count = checked(self._lib.kvl_audit_read(self._ledger, raw, written), "audit")
        return [self._structs.audit(raw[index]) for index in range(count)]

    def bell(self, bell: int) -> int:
        """Return a doorbell's count; take it before looking for what it announces."""
        count = self._ffi.new("uint32_t *")
        checked(self._lib.kvl_bell(self._ledger, bell, count), "bell")
        return int(count[0])

    def ring(self, bell: int) -> None:
        """Ring a doorbell. Nobody hears that of a lost or read-only file, which is no error here."""
        self._lib.kvl_ring(self._ledger, bell)

    def wait(self, bell: int, seen: int, deadline: float) -> bool:
        """Sleep until the bell's count differs from ``seen``, or until ``time.monotonic()`` reaches ``deadline``.

        Returns whether it rang. Runs Python's signal handlers when interrupted, and releases the interpreter lock.
        Raises :class:`DamagedLedgerError` for a file that was cut, and ValueError for a deadline that is not a number.
        """
        if math.isnan(deadline):
            message = "the deadline is not a number"
            raise ValueError(message)
        deadline_ns = int(max(0.0, min(deadline, _FAR_FUTURE)) * 1e9)
        while True:
            code = self._lib.kvl_wait(self._ledger, bell, seen, deadline_ns)
            if code == 0:
                return True
            if code == -errno.ETIMEDOUT or (code == -errno.EINTR and time.monotonic() >= deadline):
                return False
            if code != -errno.EINTR:
                checked(code, "wait")


_FAR_FUTURE = float(2**33)  # seconds; what a wait without end sleeps until

_AT_FDCWD = -100  # linux/fcntl.h: paths that are not absolute start at the working directory


class Agreement:
    """Compares the desired words of all members of a replica in one call; for the handles that registered them."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        library = _load()
        self._agree = library.lib.kvl_agree
        self._handles = tuple(handles)
        self._ledgers = library.ffi.new("kvl_ledger *[]", [handle._ledger for handle in handles])  # noqa: SLF001
        self._out = library.ffi.new("uint64_t *")

    def pair(self, bound: Bound = Bound.LIMIT) -> Update | None:
        """Return the pair that all members store of ``bound`` under their incarnation, or None while they differ."""
        if self._agree(self._ledgers, len(self._handles), BOUND_CODES[bound], self._out) == 1:
            return unpack(self._out[0], bound)
        return None
