"""``kvcached-control watch``: the state of all instances, live."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from kvcached.control import exit_codes
from kvcached.control.commands.shared_options import add_ledger_dir, instance_name, interval
from kvcached.control.rendering.text import complain
from kvcached.ledger.directory import LedgerDirectoryError
from kvcached.settings import choose_ledger_dir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvcached.control.queries.directory_view import View

DEFAULT_INTERVAL_S = 1.0

EPILOG = """\
examples:
  kvcached-control watch
  kvcached-control watch --instance my-model --json
It redraws as soon as an engine or a publisher reports something, and ends on
Ctrl-C. In a pipe it prints the table again after each change; with --json, one
line for each instance that changed."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("watch", help="show the state of all instances, live", epilog=EPILOG)
    parser.add_argument("--instance", metavar="NAME", type=instance_name, help="only this instance")
    add_ledger_dir(parser)
    parser.add_argument(
        "--interval",
        metavar="S",
        type=interval,
        default=DEFAULT_INTERVAL_S,
        help="seconds between samples of the small curve, and between searches for new engines (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each change")
    parser.set_defaults(run=run, endless=True)


def run(arguments: argparse.Namespace) -> int:
    """Watch until interrupted, which is the orderly end; the exit code."""
    import signal  # noqa: PLC0415 - the parser needs none of these
    from contextlib import closing  # noqa: PLC0415

    from kvcached.control.queries.directory_changes import follow  # noqa: PLC0415

    path = choose_ledger_dir(arguments.ledger_dir)
    signal.signal(signal.SIGTERM, _end)  # so that a terminal is left in order
    try:
        with closing(follow(path, arguments.instance, arguments.interval)) as views:  # type: ignore[type-var]
            _show(views, path, arguments)
    except LedgerDirectoryError:
        from kvcached.ledger.not_found import not_found_message  # noqa: PLC0415 - for this error only
        from kvcached.ledger.snapshot import take_snapshot  # noqa: PLC0415

        complain(not_found_message(take_snapshot(path)))
        return exit_codes.UNAVAILABLE
    except KeyboardInterrupt:
        return exit_codes.OK
    return exit_codes.OK


def _end(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _show(views: Iterator[View], path: str, arguments: argparse.Namespace) -> None:
    if arguments.json:
        _print_changes(views)
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from kvcached.control.rendering.watch_screen import show_live  # noqa: PLC0415 - on a terminal only

        show_live(views, path, arguments.interval)
    else:
        _print_boards(views)


def _print_changes(views: Iterator[View]) -> None:
    """Print a line for each instance that came, changed or ended."""
    from datetime import datetime, timezone  # noqa: PLC0415 - for this form only

    before: dict[str, dict[str, Any]] = {}
    for view in _telling(views):
        now = {instance.name: instance.to_dict() for instance in view.instances}
        time = {"time": datetime.now(tz=timezone.utc).isoformat()}
        for name, fields in now.items():
            if _without_age(fields) != _without_age(before.get(name)):
                print(json.dumps(time | fields), flush=True)
        for name in before.keys() - now.keys():
            print(json.dumps({**time, "name": name, "ended": True}), flush=True)
        before = now


def _telling(views: Iterator[View]) -> Iterator[View]:
    """Say on standard error, once each, that nobody is there and what else is wrong."""
    said: list[str] = []
    for view in views:
        texts = [*view.problems, *([view.not_found] if view.not_found else [])]
        for text in texts:
            if text not in said:
                complain(text)
        said = texts
        yield view


def _without_age(instance: dict[str, Any] | None) -> list[Any] | None:
    if instance is None:
        return None
    replicas = [{**replica, "report_age_s": None} for replica in instance["replicas"]]
    return [{**instance, "replicas": None}, replicas]


def _print_boards(views: Iterator[View]) -> None:
    """Print the board whenever something but an age changed."""
    from kvcached.control.rendering.status_table import (  # noqa: PLC0415 - for people's output only
        display_of,
        status_lines,
    )

    before = None
    display = display_of(sys.stdout)
    for view in _telling(views):
        now = [_without_age(instance.to_dict()) for instance in view.instances]
        if now and now != before:
            print("\n".join([*status_lines(view.instances, display), ""]), flush=True)
        before = now
