"""Who published what: the ledgers' bounded record of publications, put together over an instance's members."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

from kvcached.control.table import Cell, Table
from kvcached.control.text import FAINT, STRONG, limit_text, printable

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from kvcached._native import AuditRecord
    from kvcached.control.board import Look
    from kvcached.ledger import Ledger

_NS = 1_000_000_000


@dataclass(frozen=True)
class Publication:
    """One publication; ``members`` is how many ledgers recorded it."""

    record: AuditRecord
    members: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; the time is ISO 8601 in UTC."""
        record = self.record
        return {
            "time": datetime.fromtimestamp(record.when_ns / _NS, tz=timezone.utc).isoformat(),
            "instance_name": record.instance_name,
            "old": {"revision": record.before.revision, "limit_tokens": record.before.limit_tokens},
            "new": {"revision": record.after.revision, "limit_tokens": record.after.limit_tokens},
            "uid": record.uid,
            "pid": record.pid,
            "program": record.program,
            "note": record.note,
            "members": self.members,
        }


def read_history(ledgers: Iterable[Ledger], instance_name: str | None) -> list[Publication]:
    """Return the recorded publications, oldest first; also to instances that have ended since."""
    found: dict[tuple[object, ...], list[AuditRecord]] = {}
    for ledger in ledgers:
        for record in ledger.handle.audits():
            if instance_name is None or record.instance_name == instance_name:
                key = (record.when_ns, record.uid, record.pid, record.instance_name, record.after)
                found.setdefault(key, []).append(record)
    publications = [Publication(records[0], len(records)) for records in found.values()]
    return sorted(publications, key=lambda publication: publication.record.when_ns)


def history_lines(publications: Iterable[Publication], look: Look) -> list[str]:
    """Return the history as a table for people, in local time."""
    table = Table(left_columns=frozenset({0, 1, 4}))
    table.add(*(Cell(heading, FAINT) for heading in ("INSTANCE", "WHEN", "OLD", "NEW", "WHO")))
    year = datetime.now(tz=timezone.utc).year
    for publication in publications:
        record = publication.record
        when = datetime.fromtimestamp(record.when_ns / _NS, tz=timezone.utc).astimezone()
        table.add(
            Cell(printable(record.instance_name), STRONG),
            Cell(when.strftime("%m-%d %H:%M:%S" if when.year == year else "%Y-%m-%d %H:%M")),
            Cell(limit_text(record.before.limit_tokens)),
            Cell(f"r{record.after.revision} {limit_text(record.after.limit_tokens)}"),
            Cell(f"{_user(record.uid)} {printable(record.program)}[{record.pid}]"),
        )
        if record.note:
            table.remark(f"note: {printable(record.note)}", FAINT)
    return list(table.lines(look.width, colour=look.colour))


def _user(uid: int) -> str:
    import pwd  # noqa: PLC0415 - for people's output only

    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return f"uid {uid}"
