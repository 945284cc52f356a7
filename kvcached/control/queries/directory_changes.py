"""Following a ledger directory: a look at it whenever an engine or a publisher rings, and now and then by itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvcached.control.queries.directory_view import View, view_of
from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError, Refusal
from kvcached.ledger.doorbells import Doorbells
from kvcached.ledger.snapshot import is_unchanged, look_again, look_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.ledger.open_ledger import Ledger
    from kvcached.ledger.snapshot import Snapshot

LEAST_GAP_S = 0.1
"""How soon one look may follow another: a busy engine reports four times a second, and there may be many."""


def follow(path: str, instance_name: str | None, interval_s: float) -> Iterator[View]:
    """Yield a look at the directory at once, and again after each ring or after ``interval_s`` seconds; never ends.

    Raises :class:`LedgerDirectoryError` if the directory cannot be used at first. If that happens later, it shows as a
    refusal until it is over.
    """
    with LedgerDirectory(path, writable=False):
        pass
    while True:
        try:
            with LedgerDirectory(path, writable=False) as directory:
                yield from _follow_files(directory, instance_name, interval_s)
        except LedgerDirectoryError as error:
            yield View((), (Refusal("", path, str(error), error.fault),))
            time.sleep(interval_s)


def _follow_files(directory: LedgerDirectory, instance_name: str | None, interval_s: float) -> Iterator[View]:
    """Follow until a file comes, goes or is replaced, or another ledger has to be listened to."""
    snapshot = look_at(directory)
    if snapshot.fault is not None:
        raise LedgerDirectoryError(snapshot.reason, snapshot.fault)
    listened = _first_ledgers(snapshot, instance_name)
    with Doorbells(listened) as bells:
        surveyed = time.monotonic()
        while True:
            yield view_of(snapshot, instance_name)
            looked = time.monotonic()
            bells.wait(max(0.0, surveyed + interval_s - looked))
            time.sleep(max(0.0, looked + LEAST_GAP_S - time.monotonic()))
            # By the clock and not by silence: where engines are busy, bells ring all the time.
            if time.monotonic() >= surveyed + interval_s:
                surveyed = time.monotonic()
                if not is_unchanged(directory, snapshot):
                    return
            snapshot = look_again(snapshot.path, snapshot.files)
            if _first_ledgers(snapshot, instance_name) != listened:
                return


def _first_ledgers(snapshot: Snapshot, instance_name: str | None) -> list[Ledger]:
    """Return the ledgers whose bells are rung for these instances: that of each replica's first member."""
    shown = snapshot.of(instance_name) if instance_name else snapshot
    found = {replica.members[0].ledger.gpu: replica.members[0].ledger for replica in shown.replicas}
    return [found[gpu] for gpu in sorted(found)]
