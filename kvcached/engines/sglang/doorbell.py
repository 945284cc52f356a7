"""Ends the sleep of a scheduler that runs with ``--sleep-on-idle``."""

from __future__ import annotations

import contextlib
import os
from typing import Any

_POLLIN = 1
"""``zmq.POLLIN``; a constant of ZeroMQ's ABI."""


class Doorbell:
    """A descriptor among those that the sleeping scheduler waits on.

    :meth:`ring` may be called from any thread; :meth:`answer` from the scheduler's own, once per iteration.
    """

    def __init__(self, poller: Any) -> None:  # noqa: ANN401 - a zmq.Poller
        """Join ``poller``, the one that the scheduler's idle sleep polls."""
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rung = False
        poller.register(self._fd, _POLLIN)

    def ring(self) -> None:
        """Wake the scheduler now, or keep it from its next sleep."""
        os.eventfd_write(self._fd, 1)
        # Last: an answer between the two lines would find nothing to read, and the descriptor would stay readable.
        self._rung = True

    def answer(self) -> None:
        """Make the descriptor quiet again; costs one attribute read when nobody rang."""
        if self._rung:
            self._rung = False
            with contextlib.suppress(BlockingIOError):  # two rings, the first answer took both
                os.eventfd_read(self._fd)


def fit_doorbell(scheduler: Any) -> Doorbell | None:  # noqa: ANN401 - SGLang's scheduler
    """Return a doorbell at the idle sleep of ``scheduler``, or None where it never sleeps.

    The embedded Rust server's sleep waits inside Rust and takes no descriptor; there an update waits up to a second.
    """
    poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
    return None if poller is None else Doorbell(poller)
