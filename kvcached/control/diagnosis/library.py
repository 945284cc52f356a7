"""Can this Python use ledgers at all: interpreter, cffi, the native library, and what the kernel has to offer."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from kvcached import _native
from kvcached.control.diagnosis.finding import NOTE, OK, PROBLEM, Finding
from kvcached.values import Identity, Update

if TYPE_CHECKING:
    from collections.abc import Iterator

_REINSTALL = "reinstall kvcached into this Python with pip, which builds the library"
_PATIENCE_S = 2.0


def check_library() -> Iterator[Finding]:
    """Check interpreter, binding and library, then use them on a ledger in a temporary folder."""
    yield Finding(OK, "python", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}")
    try:
        yield Finding(OK, "cffi", _native.binding_version())
    except _native.NativeLibraryError as error:
        yield Finding(PROBLEM, "cffi", str(error), "pip install cffi")
        return
    try:
        version = _native.library_version()
    except _native.NativeLibraryError as error:
        yield Finding(PROBLEM, "native library", str(error), _REINSTALL)
        return
    yield Finding(OK, "native library", f"{_native.LIBRARY_PATH}, {version}")
    yield _check_kernel()


def _check_kernel() -> Finding:
    """Register, publish and ring in a ledger of our own, to see that locks and futexes work here."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvcached-doctor-") as folder:
            rang = _ring_once(folder)
    except (OSError, _native.RefusedLedgerError) as error:
        return Finding(
            NOTE, "locks, futex", f"not tried, because no ledger could be made in a temporary folder: {error}"
        )
    if not rang:
        remedy = "allow futex and fcntl(F_OFD_SETLK) in this sandbox; without them nobody can wait for an engine"
        return Finding(PROBLEM, "locks, futex", "a doorbell that was rung in a test ledger woke nobody", remedy)
    return Finding(OK, "locks, futex", "a test ledger took a registration, a publication and a doorbell")


def _ring_once(folder: str) -> bool:
    identity = Identity("doctor", "none", "", 0, 1, 1, 0, 1)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _native.create_ledger(fd, "test.ledger", 0o600)
        owner = _native.Handle(fd, "test.ledger", writable=True)
        caller = _native.Handle(fd, "test.ledger", writable=True)
    finally:
        os.close(fd)
    try:
        index = owner.register(identity, 0, 1, 1, Update(0, 0))
        seen = owner.bell(_native.PUBLISHED)
        caller.raise_desired(index, 1, Update(1, 1))
        caller.ring(_native.PUBLISHED)
        return owner.wait(_native.PUBLISHED, seen, time.monotonic() + _PATIENCE_S)
    finally:
        caller.close()
        owner.close()
