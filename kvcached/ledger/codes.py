"""What the native library's return codes say: exceptions, and reasons for which a file is not used."""

from __future__ import annotations

import enum
import errno
import os

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from typing import Any

    from kvcached.ledger.contents import FileStatus


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


class DamagedLedgerError(OSError):
    """An open ledger was cut or overwritten: nothing read from it counts, and nothing may be written to it."""


class TableFullError(Exception):
    """All slots of a ledger belong to live engines."""


def checked(code: int, subject: str) -> int:
    """Return a code that is none of failure; raise the :class:`OSError` of a negated errno, a lost ledger its own."""
    if code < _LAST_ERRNO:
        raise DamagedLedgerError(errno.EIO, "the ledger was damaged: truncated, overwritten or replaced", subject)
    if code < 0:
        raise OSError(-code, os.strerror(-code), subject)
    return code


_LAST_ERRNO = -1000  # codes below are the library's own


def refusal_of(lib: Any, code: int, file: FileStatus) -> RefusedLedgerError | None:
    """Return why ``kvl_open`` does not take ``file`` for a ledger, or None where ``code`` does not say that."""
    version = f"has ledger version {file.format}; this library reads version {lib.KVL_FORMAT}"
    kind, reason = {
        lib.KVL_E_NOT_REGULAR: (Unfit.NO_LEDGER, "not a regular file"),
        lib.KVL_E_HARD_LINKED: (Unfit.NO_LEDGER, f"has {file.links} names (hard links); a ledger has one"),
        lib.KVL_E_SIZE: (Unfit.DAMAGED, f"is {file.size} bytes long; a ledger has {lib.KVL_FILE_BYTES}"),
        lib.KVL_E_MAGIC: (Unfit.DAMAGED, "is not a ledger (wrong magic number)"),
        lib.KVL_E_BYTE_ORDER: (Unfit.OTHER_VERSION, "was written on a machine with the opposite byte order"),
        lib.KVL_E_FORMAT: (Unfit.OTHER_VERSION, version),
        lib.KVL_E_LAYOUT: (Unfit.OTHER_VERSION, f"has ledger version {lib.KVL_FORMAT}, but a different layout"),
    }.get(code, (None, ""))
    return None if kind is None else RefusedLedgerError(reason, file, kind)


def loss_of(lib: Any, code: int) -> str | None:
    """Return why publishers cannot reach an open ledger, or None where ``kvl_check`` does not say that."""
    return {
        lib.KVL_E_REPLACED: "was removed or replaced",
        lib.KVL_E_DISPLACED: "has a different registration in this slot",
        lib.KVL_E_SET_BACK: "was set back to an older state",
        lib.KVL_E_UNLOCKED: "lost its lock (was its descriptor closed?)",
    }.get(code)
