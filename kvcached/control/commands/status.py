"""``kvcached-control status``: what every live instance was told to keep, what it keeps, and who told it."""

from __future__ import annotations

import json
import os
import sys

from kvcached.control import exit_codes
from kvcached.control.commands.shared_options import add_fleet, add_json, add_ledger_dir, instance_name
from kvcached.control.queries.directory_view import view_of
from kvcached.control.rendering.text import complain
from kvcached.ledger.not_found import not_found_message
from kvcached.ledger.snapshot import open_snapshot
from kvcached.settings import choose_ledger_dir

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from kvcached.balance.budget_state import BudgetState
    from kvcached.control.queries.directory_view import View
    from kvcached.control.queries.publication_history import PublicationHistory
    from kvcached.ledger.snapshot import Snapshot

EPILOG = """\
examples:
  kvcached-control status --instance my-model
  kvcached-control status --history
  kvcached-control status --fleet etcds://h1:2379,h2:2379/prod
exit codes:
  0 shown           1 a ledger cannot be used, or two engines have one name
  2 wrong usage     3 no such instance or directory"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("status", help="show what every live instance keeps", epilog=EPILOG)
    parser.add_argument("--instance", metavar="NAME", type=instance_name, help="only this instance")
    add_ledger_dir(parser)
    parser.add_argument(
        "--history",
        action="store_true",
        help="also show who published what and when (the last 64 publications per GPU, all instances together)",
    )
    add_json(parser)
    add_fleet(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read, print; the exit code."""
    if arguments.fleet is not None:
        from kvcached.control.commands.status_fleet import run_fleet_status  # noqa: PLC0415 - only when asked for

        return run_fleet_status(arguments)
    path = choose_ledger_dir(arguments.ledger_dir)
    with open_snapshot(path) as snapshot:
        history = _read_history(snapshot, arguments)
    if snapshot.fault is not None:
        if arguments.json:
            print(json.dumps({"ledger_dir": path, "instances": [], "error": snapshot.reason}))
        complain(not_found_message(snapshot))
        return exit_codes.UNAVAILABLE
    view = view_of(snapshot, arguments.instance)
    if arguments.json:
        print(json.dumps(_to_dict(path, view, history)))
    else:
        _print(view, history, arguments.instance)
        _print_budgets(path)
    return _conclude(view, arguments.instance)


def _read_history(snapshot: Snapshot, arguments: argparse.Namespace) -> PublicationHistory | None:
    if not arguments.history:
        return None
    from kvcached.control.queries.publication_history import read_history  # noqa: PLC0415 - only when asked for

    return read_history(snapshot, arguments.instance)


def _budgets(path: str) -> list[BudgetState]:
    """Return the budgets of the directory; where there are none, as nearly always, nothing is imported."""
    try:
        if not any(name.startswith("balance.") for name in os.listdir(path)):
            return []
    except OSError:
        return []
    from kvcached.balance.budget_state import read_budgets  # noqa: PLC0415 - see above

    return read_budgets(path)


def _to_dict(path: str, view: View, history: PublicationHistory | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"ledger_dir": path, "instances": [instance.to_dict() for instance in view.instances]}
    if history is not None:
        fields["history"] = [publication.to_dict() for publication in history.publications]
        fields["history_complete"] = history.complete
    budgets = _budgets(path)
    if budgets:
        fields["budgets"] = [budget.to_dict() for budget in budgets]
    return fields


def _print(view: View, history: PublicationHistory | None, wanted: str | None) -> None:
    from kvcached.control.rendering.status_table import (  # noqa: PLC0415 - for people's output only
        display_of,
        status_lines,
    )

    display = display_of(sys.stdout)
    lines = status_lines(view.instances, display) if view.instances else []
    if history is not None:
        from kvcached.control.rendering.history_table import history_lines  # noqa: PLC0415 - only when asked for

        lines += [*([""] if lines else []), *history_lines(history, display, wanted)]
    if lines:
        print("\n".join(lines))


def _print_budgets(path: str) -> None:
    budgets = _budgets(path)
    if budgets:
        from kvcached.control.rendering.budget_lines import budget_lines  # noqa: PLC0415 - only where there are some

        print("\n".join(budget_lines(budgets)))


def _conclude(view: View, wanted: str | None) -> int:
    """Name what could not be read, and what was not found."""
    for problem in view.problems:
        complain(problem)
    if view.not_found:
        complain(view.not_found)
        if wanted:
            return exit_codes.UNAVAILABLE
    return exit_codes.PROBLEM if view.problems else exit_codes.OK
