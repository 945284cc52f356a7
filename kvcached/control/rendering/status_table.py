"""Instances as a table for people: two lines per replica, and remarks below those that need attention."""

from __future__ import annotations

from kvcached.control.rendering.status_remarks import newest_desired, outcome_word, remarks_of
from kvcached.control.rendering.table import Cell, Table
from kvcached.control.rendering.text import (
    ACTIVE,
    BAD,
    BUSY,
    FAINT,
    GOOD,
    IDLE,
    STRONG,
    age,
    can_show,
    count,
    pair_text,
    styled,
    wants_colour,
    width_of,
)
from kvcached.light_dataclasses import dataclass
from kvcached.printable_text import printable
from kvcached.values import Outcome

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

    from kvcached.ledger.instances import InstanceStatus, ReplicaStatus

BAR_CELLS = 12
BLOCKS = "█▒░"
PLAIN_BLOCKS = "#=."
SPARKS = "▁▂▃▄▅▆▇█"
PLAIN_SPARKS = ".:-=+*#@"

_HEADINGS = ("INSTANCE", "DESIRED", "APPLIED", "OUTCOME", "EVICTED", "AGE")
_SECOND_HEADINGS = ("  ENGINE", "CACHE", "IDLE", "ACTIVE", "CAPACITY", "ERRORS")
_OUTCOME_STYLES = {
    Outcome.STARTUP: FAINT,
    Outcome.APPLIED: GOOD,
    Outcome.APPLYING: BUSY,
    Outcome.HELD: BUSY,
}


@dataclass(frozen=True)
class Display:
    """What the place to print to can show."""

    width: int | None
    colour: bool
    blocks: str
    sparks: str


def display_of(stream: TextIO) -> Display:
    """Return what ``stream`` can show."""
    fine = can_show(stream, BLOCKS + SPARKS)
    return Display(
        width_of(stream),
        wants_colour(stream),
        BLOCKS if fine else PLAIN_BLOCKS,
        SPARKS if fine else PLAIN_SPARKS,
    )


def status_lines(
    instances: Sequence[InstanceStatus],
    display: Display,
    histories: Mapping[tuple[str, int], Sequence[int]] | None = None,
) -> list[str]:
    """Return the board's lines; ``histories`` are idle tokens over time by instance name and replica."""
    table = Table(left_columns=frozenset({0, 1}))
    table.add(*(Cell(heading, FAINT) for heading in _HEADINGS))
    table.add(*(Cell(heading, FAINT) for heading in _SECOND_HEADINGS))
    for instance in instances:
        for replica in instance.replicas:
            _add_replica(table, instance, replica, display)
            history = (histories or {}).get((instance.name, replica.replica))
            if history:
                table.remark(f"idle {sparkline(history, display)} up to {count(max(history))}", FAINT)
    return list(table.lines(display.width, colour=display.colour))


def _add_replica(table: Table, instance: InstanceStatus, replica: ReplicaStatus, display: Display) -> None:
    desired = newest_desired(replica)
    name = printable(instance.name)
    behind = desired.revision > replica.applied.revision
    gpus = len(replica.members) + len(replica.missing_members)
    engine = f"  {printable(instance.engine)}[{instance.pid}] {gpus} GPU{'s' if gpus > 1 else ''}"
    table.add(
        Cell(name if len(instance.replicas) == 1 else f"{name}/{replica.replica}", STRONG),
        Cell(pair_text(desired.revision, desired.limit_tokens), BAD if replica.split else ""),
        Cell(pair_text(replica.applied.revision, replica.applied.limit_tokens), BUSY if behind else ""),
        Cell(outcome_word(replica), _OUTCOME_STYLES.get(replica.outcome, BAD)),
        Cell(count(replica.evicted_tokens)),
        Cell(age(replica.report_age_s)),
    )
    table.add(
        Cell(engine, FAINT),
        _bar(replica, display),
        Cell(count(replica.idle_tokens), IDLE),
        Cell(count(replica.active_tokens), ACTIVE),
        Cell(count(replica.capacity_tokens)),
        Cell(count(replica.eviction_errors), BAD if replica.eviction_errors else ""),
    )
    for text, style in remarks_of(replica):
        table.remark(text, style)


def _bar(replica: ReplicaStatus, display: Display) -> Cell:
    """Return idle and active tokens as shares of the capacity."""
    if replica.capacity_tokens <= 0:
        return Cell("no report", FAINT)
    idle = _cells(replica.idle_tokens, replica.capacity_tokens, BAR_CELLS)
    active = _cells(replica.active_tokens, replica.capacity_tokens, BAR_CELLS - idle)
    shares = ((idle, IDLE), (active, ACTIVE), (BAR_CELLS - idle - active, FAINT))
    parts = [(block * cells, style) for block, (cells, style) in zip(display.blocks, shares, strict=True)]
    painted = "".join(styled(text, style, colour=True) for text, style in parts)
    return Cell("".join(text for text, _ in parts), painted=painted)


def _cells(tokens: int, capacity: int, most: int) -> int:
    """Return how many cells of a bar stand for ``tokens``: at least one for anything at all."""
    return max(0, min(most, max(round(BAR_CELLS * tokens / capacity), int(tokens > 0))))


def sparkline(history: Sequence[int], display: Display) -> str:
    """Return a small curve of numbers, scaled to the largest of them."""
    top = max(*history, 1)
    steps = len(display.sparks) - 1
    return "".join(display.sparks[max(0, min(steps, round(steps * number / top)))] for number in history)
