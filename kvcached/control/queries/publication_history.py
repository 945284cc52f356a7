"""Who published what: the ledgers' bounded record of publications, put together over an instance's members."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timezone
from heapq import heappop, heappush
from itertools import pairwise

from kvcached.ledger.directory import LedgerDirectoryError
from kvcached.ledger.snapshot import open_snapshot
from kvcached.light_dataclasses import dataclass
from kvcached.values import Bound

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from kvcached.ledger import AuditRecord
    from kvcached.ledger.snapshot import Snapshot
    from kvcached.values import Update

_NS = 1_000_000_000

RECORDS = 64
"""How many publications a ledger records; a newer one takes the place of the oldest."""


@dataclass(frozen=True)
class RecordedPublication:
    """One publication as its publisher recorded it.

    ``time`` is by the publisher's clock, in UTC. ``old`` and ``new`` are the pairs before and after it. ``uid``,
    ``pid`` and ``program`` are what the publisher said of itself, ``note`` is its reason, if it gave one. ``members``
    is how many of the instance's ledgers recorded it.
    """

    time: datetime
    instance_name: str
    old: Update
    new: Update
    uid: int
    pid: int
    program: str
    note: str
    members: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; the time is ISO 8601 in UTC."""
        return {
            "time": self.time.isoformat(),
            "instance_name": self.instance_name,
            "bound": self.new.bound.value,
            "old": {"revision": self.old.revision, "limit_tokens": self.old.limit_tokens},
            "new": {"revision": self.new.revision, "limit_tokens": self.new.limit_tokens},
            "uid": self.uid,
            "pid": self.pid,
            "program": self.program,
            "note": self.note,
            "members": self.members,
        }


def _publication_of(record: AuditRecord, members: int) -> RecordedPublication:
    return RecordedPublication(
        datetime.fromtimestamp(record.when_ns / _NS, tz=timezone.utc),
        record.instance_name,
        record.before,
        record.after,
        record.uid,
        record.pid,
        record.program,
        record.note,
        members,
    )


@dataclass(frozen=True)
class PublicationHistory:
    """What the record holds, oldest first; ``complete`` is False where older publications have left it, or may have."""

    publications: tuple[RecordedPublication, ...]
    complete: bool


def get_publication_history(path: str, instance_name: str | None) -> PublicationHistory:
    """Return the history that a directory's ledgers hold. Raises :class:`LedgerDirectoryError` if it was not seen."""
    with open_snapshot(path) as snapshot:
        if snapshot.fault is not None:
            raise LedgerDirectoryError(snapshot.reason, snapshot.fault)
        if snapshot.unseen and not snapshot.ledgers:
            message = f"no ledger in {path} could be looked at: {'; '.join(snapshot.unseen)}"
            raise LedgerDirectoryError(message)
        return read_history(snapshot, instance_name)


def read_history(snapshot: Snapshot, instance_name: str | None) -> PublicationHistory:
    """Return the recorded publications, also to instances that have ended since."""
    unread = list(snapshot.unseen)
    records = []
    for ledger in snapshot.ledgers:
        try:
            records.append(list(reversed(ledger.publications())))
        except OSError as error:  # it was cut or overwritten a moment ago
            unread.append(str(error))
    ordered = _in_order(records)
    shown = tuple(one for one in ordered if instance_name is None or one.instance_name == instance_name)
    full = any(len(record) >= RECORDS for record in records)
    return PublicationHistory(shown, not (unread or full or _is_behind(shown, snapshot, instance_name)))


def _is_behind(shown: Sequence[RecordedPublication], snapshot: Snapshot, instance_name: str | None) -> bool:
    """Return whether revisions are in force that the record does not hold, as after a ledger was replaced."""
    recorded: dict[tuple[str, Bound], set[int]] = {}
    for publication in shown:
        recorded.setdefault((publication.instance_name, publication.new.bound), {0}).add(publication.new.revision)
    if any(one.old.revision not in recorded[one.instance_name, one.new.bound] for one in shown):
        return True
    members = [member for replica in snapshot.replicas for member in replica.members]
    return any(
        member.slot.desired_of(bound).revision not in recorded.get((name, bound), {0})
        for member in members
        for bound in Bound
        if instance_name in (None, name := member.slot.identity.instance_name)
    )


def _in_order(records: Sequence[Sequence[AuditRecord]]) -> list[RecordedPublication]:
    """Return the publications of all ledgers, each once, in the order in which the ledgers recorded them.

    A clock may have been set back. Each ledger knows its own order; the clock decides between ledgers only, and where
    two ledgers disagree, as after two publishers at the same moment.
    """
    queues = [[_key(record) for record in one] for one in records]
    found = {_key(record): record for one in records for record in one}
    members = Counter(key for queue in queues for key in queue)
    after: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {key: [] for key in found}
    for queue in queues:
        for earlier, later in pairwise(queue):
            after[earlier].append(later)
    waits = Counter(later for following in after.values() for later in following)
    free = sorted(key for key in found if not waits[key])
    ordered = []
    while found:
        key = heappop(free) if free else min(found)
        if key in found:
            ordered.append(_publication_of(found.pop(key), members[key]))
            for later in after[key]:
                waits[later] -= 1
                if not waits[later]:
                    heappush(free, later)
    return ordered


def _key(record: AuditRecord) -> tuple[Any, ...]:
    update = record.after
    bound = update.bound.value
    return record.when_ns, record.uid, record.pid, record.instance_name, bound, update.revision, update.limit_tokens
