"""Can this Python use ledgers at all: interpreter, cffi, the native library, and what the kernel has to offer."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from kvcached.control.diagnosis.finding import NOTE, OK, PROBLEM, Finding
from kvcached.ledger import binding
from kvcached.ledger.codes import RefusedLedgerError
from kvcached.values import Identity, Update

if TYPE_CHECKING:
    from collections.abc import Iterator

KERNEL = "locks, futex"
_REINSTALL = "reinstall kvcached-control in this Python with pip, which builds the library"
_PATIENCE_S = 2.0


def check_library() -> Iterator[Finding]:
    """Check interpreter, binding and library, then use them on a ledger in a temporary folder."""
    yield Finding(OK, "python", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}")
    try:
        yield Finding(OK, "cffi", binding.binding_version())
    except binding.NativeLibraryError as error:
        yield Finding(PROBLEM, "cffi", str(error), "pip install cffi")
        return
    try:
        version = binding.library_version()
    except binding.NativeLibraryError as error:
        yield Finding(PROBLEM, "native library", str(error), _REINSTALL)
        return
    yield Finding(OK, "native library", f"{binding.LIBRARY_PATH}, {version}")
    yield _check_kernel()


def _check_kernel() -> Finding:
    """Register, publish and ring in a ledger of our own, to see that locks and futexes work here."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvcached-doctor-") as folder, _two_handles(folder) as handles:
            return _use(*handles)
    except (OSError, RefusedLedgerError) as error:
        text = f"not tried, because no ledger could be made in a temporary folder: {error}"
        return Finding(NOTE, KERNEL, text, "set TMPDIR to a folder that may be written")


@contextmanager
def _two_handles(folder: str) -> Iterator[tuple[binding.Handle, binding.Handle]]:
    """Make a ledger and open it twice: for an engine, and for a caller."""
    with ExitStack() as stack:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        binding.create_ledger(fd, "test.ledger", 0o600)
        owner = binding.Handle(fd, "test.ledger", writable=True)
        stack.callback(owner.close)
        caller = binding.Handle(fd, "test.ledger", writable=True)
        stack.callback(caller.close)
        yield owner, caller


def _use(owner: binding.Handle, caller: binding.Handle) -> Finding:
    try:
        index = owner.register(Identity("doctor", "none", "", 0, 1, 1, 0, 1), 0, 1, 1, [Update(0, 0)])
        alive = caller.read_slot(index) is not None
        seen = owner.bell(binding.PUBLISHED)
        caller.raise_desired(index, 1, Update(1, 1))
        caller.ring(binding.PUBLISHED)
        rang = owner.wait(binding.PUBLISHED, seen, time.monotonic() + _PATIENCE_S)
    except OSError as error:
        text = f"engines cannot register, and callers cannot see which are alive: {error.strerror}"
        return Finding(PROBLEM, KERNEL, text, "allow fcntl(F_OFD_SETLK, F_OFD_GETLK) in this sandbox")
    if not alive:
        text = "a test engine that holds its lock does not appear to be alive"
        return Finding(PROBLEM, KERNEL, text, "allow fcntl(F_OFD_SETLK, F_OFD_GETLK) in this sandbox")
    if not rang:
        remedy = "allow futex in this sandbox; without it no command can wait for an engine"
        return Finding(PROBLEM, KERNEL, "the doorbell of a test ledger woke no waiter", remedy)
    return Finding(OK, KERNEL, "registration, publication and doorbell work in a test ledger")
