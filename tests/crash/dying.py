"""Performs one operation again and again, each time in a process that gets a signal at the next call into the library.

``python -m crash.dying OPERATION LEDGER_DIR SIGNAL`` prints ``crashed CALL`` after each of them and goes on when it
reads a line; a process that was only stopped is killed then. It prints ``finished`` once the operation came to its end.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from support.toys import identity

from kvcached.ledger import binding
from kvcached.ledger.publication import publish
from kvcached.ledger.registration import Beginning, register
from kvcached.values import Bound, Outcome, Report, Update

if TYPE_CHECKING:
    from collections.abc import Callable

GPUS = ("cpu-0", "cpu-1", "cpu-2")
WRITING = (
    "open",
    "create",
    "register",
    "unregister",
    "raise",
    "ring",
    "acknowledge",
    "audit_write",
    "is_owned",
    "close",
)


class Countdown:
    """The library, with a signal to this process before one of the calls that write, lock or open."""

    def __init__(self, lib: object, calls: int, number: int, told: int) -> None:
        self._lib = lib
        self._told = told
        self._left = calls
        self._number = number

    def __getattr__(self, name: str) -> object:
        if name.removeprefix("kvl_") in WRITING:
            self._left -= 1
            if self._left == 0:
                os.write(self._told, name.encode())
                os.kill(os.getpid(), self._number)
        return getattr(self._lib, name)


def do_publish(ledger_dir: str) -> None:
    """Publish to all members."""
    publish(7, "engine", ledger_dir)


def do_publish_cap(ledger_dir: str) -> None:
    """Publish a cap to all members."""
    publish(7, "engine", ledger_dir, bound=Bound.CAP)


def do_register(ledger_dir: str) -> None:
    """Register in all members, with one ledger that does not exist yet, report, and leave."""
    with suppress(FileNotFoundError):
        os.unlink(f"{ledger_dir}/new.ledger")
    registration = register(identity("newcomer"), (*GPUS, "new"), ledger_dir, Beginning((Update(0, 16000),)))
    registration.acknowledge(Report(Update(0, 16000), 0, Outcome.STARTUP, "", 1, 2, 3, 4, 5))
    registration.close()


OPERATIONS: dict[str, Callable[[str], None]] = {
    "publish": do_publish,
    "publish a cap": do_publish_cap,
    "register": do_register,
}


def main() -> None:
    """Crash at every call."""
    operation, ledger_dir, number = OPERATIONS[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    library = binding._load()
    lib = library.lib
    for calls in range(1, 1000):
        read_end, told = os.pipe()
        child = os.fork()
        if child == 0:
            library.lib = Countdown(lib, calls, number, told)
            operation(ledger_dir)
            os._exit(0)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print("finished", flush=True)
            return
        # Only now that it is dead or stopped for sure: whoever reads this line looks at what it left behind.
        print("crashed", os.read(read_end, 64).decode(), flush=True)
        os.close(read_end)
        os.close(told)
        sys.stdin.readline()
        if os.WIFSTOPPED(status):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
