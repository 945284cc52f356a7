"""``status`` with ``--fleet``: what each instance name should keep, and what became of it on every node."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from kvcached.control import exit_codes
from kvcached.control.commands.set_fleet import open_fleet
from kvcached.control.rendering.status_table import display_of
from kvcached.control.rendering.table import Cell, Table
from kvcached.control.rendering.text import BAD, BUSY, FAINT, GOOD, STRONG, complain, limit_text
from kvcached.fleet.store import Stored

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvcached.fleet.document import DesiredTokens
    from kvcached.fleet.fleet_view import FleetTarget, FleetView

_STYLES = {"applied": GOOD, "applying": BUSY, "absent": FAINT, "unmanaged": FAINT, "on_hold": BUSY}


def run_fleet_status(arguments: argparse.Namespace) -> int:
    """Read, print; the exit code."""
    if arguments.history or arguments.ledger_dir:
        arguments.parser.error("--history and --ledger-dir are about one node and cannot be used with --fleet")
    with open_fleet(arguments) as operator:
        view = operator.read()
    names = [name for name in _all_names(view) if arguments.instance in {None, name}]
    if arguments.json:
        print(json.dumps(_to_dict(view, names)))
    elif names:
        print("\n".join(_lines(view, names)))
    if not names:
        wanted = f" named {arguments.instance}" if arguments.instance else ""
        complain(f"the fleet has no document and no instance{wanted}; {len(view.agents)} agent(s) are alive")
    return exit_codes.OK if names or not arguments.instance else exit_codes.UNAVAILABLE


def _all_names(view: FleetView) -> list[str]:
    return sorted({*view.documents, *(one.instance for one in view.targets)})


def _to_dict(view: FleetView, names: Sequence[str]) -> dict[str, Any]:
    return {
        "revision": view.revision,
        "agents": {node: dict(presence) for node, presence in view.agents.items()},
        "instances": [_instance(view, name) for name in names],
    }


def _instance(view: FleetView, name: str) -> dict[str, Any]:
    stored = view.documents.get(name, Stored("", None))
    return {
        "name": name,
        "revision": int(stored.revision or 0),
        "document": None if stored.desired is None else dict(stored.desired.fields),
        "error": None if stored.error is None else str(stored.error),
        "targets": [one.to_dict() for one in _targets(view, name)],
        "holds": [
            {"node": node, "note": hold.note, "until": hold.until}
            for (node, instance), hold in view.holds.items()
            if instance == name
        ],
    }


def _targets(view: FleetView, name: str) -> list[FleetTarget]:
    return [one for one in view.targets if one.instance == name]


def _lines(view: FleetView, names: Sequence[str]) -> list[str]:
    table = Table(left_columns=frozenset({0, 1, 4}))
    table.add(
        *(Cell(heading, FAINT) for heading in ("INSTANCE", "NODE", "LIMIT", "CAP", "STATE", "OBSERVED", "LEDGER"))
    )
    for name in names:
        stored = view.documents.get(name, Stored("", None))
        tokens = stored.desired.rules.tokens if stored.desired else None
        seen = f"r{stored.revision}" if stored.revision else ""
        table.add(Cell(name, STRONG), Cell(""), *_tokens(tokens), Cell(_summary(view, name)), Cell(seen), Cell(""))
        _remark(table, stored)
        for one in _targets(view, name):
            _add(table, one)
    display = display_of(sys.stdout)
    return list(table.lines(display.width, colour=display.colour))


def _add(table: Table, target: FleetTarget) -> None:
    status = target.status
    values = (status.limit_tokens, status.cap_tokens)
    cells = (Cell("" if value is None else limit_text(value)) for value in values)
    seen = f"r{status.observed}" if status.observed else ""
    state = Cell(status.state, _STYLES.get(status.state, BAD))
    table.add(Cell(""), Cell(target.node), *cells, state, Cell(seen), Cell(f"r{status.ledger_revision}"))
    if status.reason:
        table.remark(f"{target.node}: {status.reason}", BAD)


def _tokens(tokens: DesiredTokens | None) -> tuple[Cell, Cell]:
    values = (None, None) if tokens is None else (tokens.limit_tokens, tokens.cap_tokens)
    limit, cap = (Cell("" if value is None else limit_text(value)) for value in values)
    return limit, cap


def _summary(view: FleetView, name: str) -> str:
    live = view.live(name)
    return f"{sum(one.status.state == 'applied' for one in live)} of {len(live)} applied"


def _remark(table: Table, stored: Stored) -> None:
    if stored.error is not None:
        table.remark(f"no agent applies this document: {stored.error}", BAD)
    if stored.desired is None:
        return
    desired = stored.desired
    if desired.by or desired.note:
        table.remark(f"by {desired.by} {desired.at}{f': {desired.note}' if desired.note else ''}", FAINT)
    for rule in desired.rules.where:
        where = ", ".join(f"{key}={value}" for key, value in rule.labels.items())
        limit, cap = _tokens(rule.tokens)
        table.remark(f"where {where}: limit {limit.text or 'as above'}, cap {cap.text or 'as above'}", FAINT)
    rollout = desired.rollout
    if rollout is not None:
        share = 100 * rollout.share / 2**64
        why = f": {rollout.why}" if rollout.why else ""
        table.remark(f"roll-out {rollout.state} at {share:.1f} % of all positions{why}", BUSY)
