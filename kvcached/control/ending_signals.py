"""Signals that end a command while it waits: what it did is told before it ends."""

from __future__ import annotations

import signal
from contextlib import contextmanager

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import NoReturn

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def code_of(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code of a command that was ended so."""
    return 128 + (interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT)


@contextmanager
def raising_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise, as Ctrl-C does, while the context lasts; main thread only.

    One that is ignored, as SIGHUP is under nohup, stays ignored.
    """
    before = {number: signal.getsignal(number) for number in _ENDING}
    taken = [number for number in _ENDING if before[number] is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def held_signals() -> Iterator[None]:
    """Let what would end the command wait until the context ends; for what must not be done by half."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_ENDING))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)
