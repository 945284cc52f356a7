"""Hazards of a publisher that ends between its last store and the doorbell."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from support.toys import poll_now

from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.subscription import Subscription
from kvcached.values import Identity, Update

if TYPE_CHECKING:
    from pathlib import Path

NOTICED_WITHIN_S = 2.0


def raise_without_ringing(directory: str, update: Update) -> None:
    """Do what a publisher does that is killed after its last store."""
    with LedgerDirectory(directory, writable=True) as opened:
        (ledger,) = opened.open_all()
        ((index, slot),) = ledger.handle.live_slots()
        assert ledger.handle.raise_desired(index, slot.incarnation, update)[0]


def test_a_publication_whose_doorbell_never_rang_is_taken_by_an_idle_engine(tmp_path: Path) -> None:
    """An engine that sleeps on its doorbell still takes a complete publication whose publisher died before ringing."""
    directory = tmp_path / "ledgers"
    directory.mkdir(mode=0o700)
    subscription = Subscription(Identity("a", "toy", "1", 0, 1, 1, 16000, 16), ["cpu-0"], str(directory))
    subscription.start()
    try:
        publisher = threading.Timer(0.2, raise_without_ringing, [str(directory), Update(1, 7)])
        publisher.start()
        started = time.monotonic()
        assert subscription.wait(started + 30)
        publisher.join()
        assert time.monotonic() - started < NOTICED_WITHIN_S
        assert poll_now(subscription) == Update(1, 7)
    finally:
        subscription.close()
