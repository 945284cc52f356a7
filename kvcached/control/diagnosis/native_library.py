"""Can this Python use ledgers at all: interpreter, cffi, the native library, and what the kernel has to offer."""

from __future__ import annotations

import platform
import sys
import tempfile
from typing import TYPE_CHECKING

from kvcached.control.diagnosis.finding import NOTE, OK, PROBLEM, Finding
from kvcached.ledger import NativeLibraryError
from kvcached.ledger.codes import RefusedLedgerError
from kvcached.ledger.self_test import Trial, cffi_version, library_in_use, try_ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

KERNEL = "locks, futex"
_REINSTALL = "reinstall kvcached-control in this Python with pip, which builds the library"


def check_library() -> Iterator[Finding]:
    """Check interpreter, binding and library, then use them on a ledger in a temporary folder."""
    yield Finding(OK, "python", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}")
    try:
        yield Finding(OK, "cffi", cffi_version())
    except NativeLibraryError as error:
        yield Finding(PROBLEM, "cffi", str(error), "pip install cffi")
        return
    try:
        library = library_in_use()
    except NativeLibraryError as error:
        yield Finding(PROBLEM, "native library", str(error), _REINSTALL)
        return
    yield Finding(OK, "native library", library)
    yield _check_kernel()


def _check_kernel() -> Finding:
    """Register, publish and ring in a ledger of our own, to see that locks and futexes work here."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvcached-doctor-") as folder:
            trial = try_ledger(folder)
    except (OSError, RefusedLedgerError) as error:
        text = f"not tested: no ledger could be created in a temporary folder: {error}"
        return Finding(NOTE, KERNEL, text, "set TMPDIR to a writable folder")
    return _judge(trial)


def _judge(trial: Trial) -> Finding:
    if trial.error:
        text = f"engines cannot register, and callers cannot see which are alive: {trial.error}"
        return Finding(PROBLEM, KERNEL, text, "allow fcntl(F_OFD_SETLK, F_OFD_GETLK) in this sandbox")
    if not trial.seen_alive:
        text = "a test engine that holds its lock does not appear to be alive"
        return Finding(PROBLEM, KERNEL, text, "allow fcntl(F_OFD_SETLK, F_OFD_GETLK) in this sandbox")
    if not trial.rung:
        remedy = "allow futex in this sandbox; without it no command can wait for an engine"
        return Finding(PROBLEM, KERNEL, "the doorbell of a test ledger woke no waiter", remedy)
    return Finding(OK, KERNEL, "registration, publication and doorbell work in a test ledger")
