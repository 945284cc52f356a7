"""``kvcached-control status``: what every live instance was told to keep, and what it keeps."""

from __future__ import annotations

import json
import sys

from kvcached.control import exits
from kvcached.control.options import add_json, add_ledger_dir, instance_name
from kvcached.instances import find_replicas, statuses_of
from kvcached.ledger import LedgerDirectory, LedgerDirectoryError
from kvcached.settings import choose_ledger_dir

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvcached.instances import InstanceStatus
    from kvcached.ledger import Refusal

EPILOG = """\
example:
  kvcached-control status --instance my-model"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("status", help="show what every live instance keeps", epilog=EPILOG)
    parser.add_argument("--instance", metavar="NAME", type=instance_name, help="only this instance")
    add_ledger_dir(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read, print; the exit code."""
    path = choose_ledger_dir(arguments.ledger_dir)
    try:
        with LedgerDirectory(path, writable=False) as directory:
            instances = statuses_of(find_replicas(directory.open_all(), arguments.instance))
            refusals = directory.refusals
    except LedgerDirectoryError as error:
        if arguments.json:
            print(json.dumps({"ledger_dir": path, "instances": []}))
        print(f"kvcached-control: {error}", file=sys.stderr)
        return exits.UNAVAILABLE
    if arguments.json:
        print(json.dumps({"ledger_dir": path, "instances": [instance.to_dict() for instance in instances]}))
    elif instances:
        from kvcached.control.table import print_instances  # noqa: PLC0415 - its library is for people's output only

        print_instances(instances)
    return _conclude(path, instances, refusals, arguments.instance)


def _conclude(path: str, instances: Sequence[InstanceStatus], refusals: Sequence[Refusal], wanted: str | None) -> int:
    """Name what could not be read, and what was not found."""
    for refusal in refusals:
        print(f"kvcached-control: {refusal.path}: {refusal.reason}", file=sys.stderr)
    if not instances:
        what = f"live instance {wanted!r}" if wanted else "live instance"
        print(f"kvcached-control: no {what} in {path}", file=sys.stderr)
        return exits.UNAVAILABLE if wanted else exits.OK
    return exits.PROBLEM if refusals else exits.OK
