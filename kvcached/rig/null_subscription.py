"""What takes the subscription's place while ``KVCACHED_DISABLE=1`` is set: a limit nobody can change."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.ledger.registration import SlotPlace
    from kvcached.values import Report, Update


class NoSubscription:
    """Takes no publications and tells nobody anything."""

    registered = True
    """There is nothing to wait for."""

    def place(self) -> SlotPlace | None:
        """Return None."""
        return None

    def start(self) -> None:
        """Do nothing."""

    def poll(self) -> Update | None:
        """Return None."""
        return None

    def acknowledge(self, report: Report) -> None:
        """Do nothing."""

    def refresh(self, report_of: Callable[[], Report], *, idle: bool = False) -> None:
        """Do nothing."""

    def wait(self, deadline: float) -> bool:
        """Sleep until ``deadline`` on the monotonic clock, in seconds."""
        time.sleep(max(0.0, deadline - time.monotonic()))
        return False

    def close(self) -> None:
        """Do nothing."""
