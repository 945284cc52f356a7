"""The publication history as a table for people, in local time."""

from __future__ import annotations

from kvcached.control.queries.publication_history import RECORDS
from kvcached.control.rendering.table import Cell, Table
from kvcached.control.rendering.text import FAINT, STRONG, limit_text, styled
from kvcached.values import Bound

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from kvcached.control.queries.publication_history import PublicationHistory
    from kvcached.control.rendering.status_table import Display
    from kvcached.values import Update


def history_lines(history: PublicationHistory, display: Display, wanted: str | None) -> list[str]:
    """Return the history as a table for people, in local time, and below it what is not known any more."""
    table = Table(left_columns=frozenset({0, 1, 4}))
    table.add(*(Cell(heading, FAINT) for heading in ("INSTANCE", "WHEN", "OLD", "NEW", "WHO")))
    for publication in history.publications:
        when = publication.time.astimezone()
        table.add(
            Cell(publication.instance_name, STRONG),
            Cell(when.isoformat(" ", "seconds").replace("+00:00", "Z")),
            Cell(limit_text(publication.old.limit_tokens)),
            Cell(f"{_kind(publication.new)}r{publication.new.revision} {limit_text(publication.new.limit_tokens)}"),
            Cell(f"{_user(publication.uid)} {publication.program}[{publication.pid}]"),
        )
        if publication.note:
            table.remark(f"note: {publication.note}", FAINT)
    lines = list(table.lines(display.width, colour=display.colour)) if history.publications else []
    if history.complete:
        return lines or [f"nothing was published{f' to {wanted}' if wanted else ''} yet"]
    keeps = f"the record keeps the last {RECORDS} publications of each GPU, to all instances together"
    gone = "older ones are gone" if lines else f"none{f' to {wanted}' if wanted else ''} is in it"
    return [*lines, styled(f"{keeps}; {gone}", FAINT, colour=display.colour)]


def _kind(update: Update) -> str:
    return "cap " if update.bound is Bound.CAP else ""


def _user(uid: int) -> str:
    import pwd  # noqa: PLC0415 - for people's output only

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
