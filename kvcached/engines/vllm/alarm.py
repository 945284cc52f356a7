"""Turns the loop of an engine that idles at a time that was set, and at no other."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Alarm:
    """One timer at a time. All methods may be called from any thread, also from within ``ring``."""

    def __init__(self, ring: Callable[[], None]) -> None:
        """Call ``ring`` on a thread of its own when the time has come."""
        self._ring = ring
        self._lock = threading.Lock()
        self._at: float | None = None
        self._timer: threading.Timer | None = None

    def set(self, at: float | None) -> None:
        """Ring at ``at`` (monotonic, seconds), or not at all."""
        with self._lock:
            if at == self._at:
                return
            self._stop()
            if at is not None:
                self._at = at
                self._timer = threading.Timer(max(at - time.monotonic(), 0.0), self._fire, (at,))
                self._timer.name = "kvcached-alarm"
                self._timer.daemon = True
                self._timer.start()

    def cancel(self) -> None:
        """Do not ring."""
        self.set(None)

    def _fire(self, at: float) -> None:
        with self._lock:
            if at != self._at:
                return
            self._stop()
        self._ring()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._at = None
