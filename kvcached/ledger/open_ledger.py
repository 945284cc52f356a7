"""One open ledger file, and what those who look at it or wait on it need of it."""

from __future__ import annotations

from kvcached.ledger.codes import DamagedLedgerError

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Container

    from kvcached.ledger.binding import Handle
    from kvcached.ledger.contents import AuditRecord

LISTEN_S = 0.25
"""How long one sleep on a doorbell should last at most, in seconds: who sleeps there cannot be woken otherwise."""


class Ledger:
    """One open ledger file of a directory. Any thread may use it until the directory is closed.

    ``handle`` is for this package alone.
    """

    def __init__(self, gpu: str, path: str, handle: Handle, *, writable: bool) -> None:
        self.gpu = gpu
        self.path = path
        self.handle = handle
        self.writable = writable

    def is_current(self) -> bool:
        """Return whether the path still leads to the file that is open here, whole and under its name."""
        try:
            return self.handle.check(self.path) is None
        except DamagedLedgerError:
            return False
        except OSError:
            return True  # it could not be looked at, which says nothing about the file

    def bell(self, bell: int) -> int:
        """Return a doorbell's count; take it before looking for what it announces. Raises :class:`OSError`."""
        return self.handle.bell(bell)

    def wait(self, bell: int, seen: int, deadline: float) -> bool:
        """Sleep until the bell's count differs from ``seen``, or until ``time.monotonic()`` reaches ``deadline``.

        Returns whether it rang. Raises :class:`OSError` for a file that was cut.
        """
        return self.handle.wait(bell, seen, deadline)

    def publications(self) -> list[AuditRecord]:
        """Return the recorded publications, newest first; older ones have left the file. Raises :class:`OSError`."""
        return self.handle.audits()

    @property
    def slots(self) -> int:
        """How many engines the file has room for."""
        return self.handle.slots

    def count_ended(self, live: Container[int]) -> int:
        """Return how many slots were used once and are not among the ``live`` indices."""
        # An owner writes its startup limit into the word, so one that is not zero was owned before.
        return sum(1 for index in range(self.slots) if index not in live and not self.handle.is_blank(index))
