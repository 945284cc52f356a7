"""``--dry-run`` of ``kvcached-control set`` and ``cap``: say what a publication would do."""

from __future__ import annotations

import json
import sys

from kvcached.control import exit_codes
from kvcached.control.queries.forecast import Conditions, forecast
from kvcached.control.rendering.status_table import display_of
from kvcached.control.rendering.table import Cell, Table
from kvcached.control.rendering.text import ACTIVE, BUSY, FAINT, IDLE, STRONG, complain, count, limit_text
from kvcached.instance_patterns import is_pattern
from kvcached.limits import format_limit
from kvcached.values import Bound

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from kvcached.control.queries.forecast import Forecast

_HEADINGS = ("INSTANCE", "KEEPS", "IDLE", "EVICTS NOW", "ACTIVE", "LATER UP TO")


def run_dry(arguments: argparse.Namespace, limits: Mapping[str, int], directory: str) -> int:
    """Print the forecasts; the exit code that publishing would most likely end with."""
    conditions = Conditions(
        arguments.if_revision, arguments.if_incarnation, different=arguments.if_different, bound=arguments.bound
    )
    forecasts = [forecast(limit, name, directory, conditions) for name, limit in limits.items()]
    if arguments.json:
        whole = {"results": [entry.to_dict() for entry in forecasts]}
        print(json.dumps(whole if is_pattern(arguments.instance) else forecasts[0].to_dict()))
    else:
        _print(forecasts)
    return max(exit_codes.OF_STATUS[entry.status] for entry in forecasts)


def _print(forecasts: Sequence[Forecast]) -> None:
    display = display_of(sys.stdout)
    table = Table(left_columns=frozenset({0}))
    table.add(*(Cell(heading, FAINT) for heading in _HEADINGS))
    possible = [entry for entry in forecasts if entry.replicas]
    for entry in possible:
        for replica in entry.replicas:
            alone = len(entry.replicas) == 1
            table.add(
                Cell(entry.instance_name if alone else f"{entry.instance_name}/{replica.replica}", STRONG),
                Cell(limit_text(replica.kept_tokens)),
                Cell(count(replica.idle_tokens), IDLE),
                Cell(count(replica.evict_now_tokens), BUSY if replica.evict_now_tokens else ""),
                Cell(count(replica.active_tokens), ACTIVE),
                Cell(count(replica.evict_later_tokens)),
            )
    if possible:
        unchanged = all(entry.unchanged for entry in possible)
        said = "is already desired, so nothing would be published" if unchanged else "would be published"
        told = sorted({entry.limit_tokens for entry in forecasts})
        of_cap = "cap " if forecasts[0].bound is Bound.CAP else ""
        print(f"{of_cap}{' or '.join(map(format_limit, told))} {said}; nothing was written")
        print("\n".join(table.lines(display.width, colour=display.colour)))
    for entry in forecasts:
        problems = [
            *([] if entry.status == "accepted" else [f"{entry.instance_name}: {entry.status}"]),
            *entry.warnings,
        ]
        if problems:
            complain("; ".join(problems))
