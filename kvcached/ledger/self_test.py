"""Whether ledgers work here at all: the versions of what they need, and a ledger that is made only to be tried."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass

from kvcached.ledger import binding
from kvcached.values import Identity, Update

PATIENCE_S = 2.0
"""How long the doorbell of the tried ledger may take, in seconds."""


def cffi_version() -> str:
    """Return the version of cffi's runtime. Raises :class:`NativeLibraryError` if it is not installed."""
    return binding.binding_version()


def library_in_use() -> str:
    """Return path and version of the native library. Raises :class:`NativeLibraryError` if it does not load."""
    version = binding.library_version()
    return f"{binding.LIBRARY_PATH}, {version}"


@dataclass(frozen=True)
class Trial:
    """What worked: an engine that holds its lock was ``seen_alive``, and a doorbell that was ``rung`` woke it.

    ``error`` is the system's word for what did not; the other two then say nothing.
    """

    seen_alive: bool = False
    rung: bool = False
    error: str = ""


def try_ledger(folder: str) -> Trial:
    """Make a ledger in an empty folder, register in it, publish and ring.

    Raises :class:`OSError` or :class:`RefusedLedgerError` if none could be made or opened there, so that nothing was
    tried.
    """
    with ExitStack() as stack:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        binding.create_ledger(fd, "test.ledger", 0o600)
        engine = binding.Handle(fd, "test.ledger", writable=True)
        stack.callback(engine.close)
        publisher = binding.Handle(fd, "test.ledger", writable=True)
        stack.callback(publisher.close)
        try:
            return _try(engine, publisher)
        except OSError as error:
            return Trial(error=error.strerror or str(error))


def _try(engine: binding.Handle, publisher: binding.Handle) -> Trial:
    index = engine.register(Identity("doctor", "none", "", 0, 1, 1, 0, 1), 0, 1, 1, [Update(0, 0)])
    alive = publisher.read_slot(index) is not None
    seen = engine.bell(binding.PUBLISHED)
    publisher.raise_desired(index, 1, Update(1, 1))
    publisher.ring(binding.PUBLISHED)
    return Trial(alive, engine.wait(binding.PUBLISHED, seen, time.monotonic() + PATIENCE_S))
