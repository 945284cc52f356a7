"""Listening to several ledgers at once, for those who look at a directory again and again."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcached.ledger import ACKNOWLEDGED, PUBLISHED
from kvcached.ledger.open_ledger import LISTEN_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

    from kvcached.ledger.open_ledger import Ledger


class Doorbells:
    """Listens to several ledgers at once. A futex is one word, so each doorbell takes a thread; they only sleep."""

    def __init__(self, ledgers: Iterable[Ledger], rung: threading.Event | None = None) -> None:
        """Start listening. The ledgers must stay open until :meth:`close`.

        ``rung`` is set when one rings; give one that outlives these ledgers, or that others set as well.
        """
        self._rung = threading.Event() if rung is None else rung
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, args=(ledger, bell), daemon=True)
            for ledger in ledgers
            for bell in (PUBLISHED, ACKNOWLEDGED)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something rang since the last return; False when that did not happen in time."""
        rung = self._rung.wait(timeout_s)
        self._rung.clear()
        return rung

    def _listen(self, ledger: Ledger, bell: int) -> None:
        with suppress(OSError):  # a ledger that was cut rings no more; the look by the clock finds it
            seen = ledger.bell(bell)
            while not self._stopping.is_set():
                if ledger.wait(bell, seen, time.monotonic() + LISTEN_S):
                    seen = ledger.bell(bell)
                    self._rung.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, so that the ledgers may be closed."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
