"""``kvcached-control fleet``: go on with a roll-out or undo it, drop a document, leave one node alone."""

from __future__ import annotations

import argparse
import json
import re
import time
from typing import TYPE_CHECKING

from kvcached.control import exit_codes
from kvcached.control.commands import shared_options
from kvcached.control.commands.publishing_options import DEFAULT_WAIT_S
from kvcached.control.rendering.text import complain, say

if TYPE_CHECKING:
    from kvcached.fleet.etcd.etcd_operator import FleetOperator
    from kvcached.fleet.fleet_result import FleetResult
    from kvcached.fleet.store import Stored

ACTIONS = {
    "resume": "go on with a roll-out that was paused or whose driver ended",
    "pause": "stop a roll-out where it is",
    "rollback": "write what was desired before the roll-out, for all targets at once",
    "unset": "delete the document: engines keep what they have",
    "hold": "let the agent of --node leave the instance alone",
    "release": "end a hold",
}

EPILOG = "\n".join(
    [
        "actions:",
        *(f"  {name:<9} {text}" for name, text in ACTIONS.items()),
        "examples:",
        "  kvcached-control fleet resume --instance chat",
        "  kvcached-control fleet hold --node gpu-7 --instance chat --for 2h --note trial",
        "exit codes: as for set --fleet",
    ]
)

_DURATION = re.compile(r"([1-9][0-9]{0,4})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("fleet", help="resume, undo or suspend what a fleet desires", epilog=EPILOG)
    parser.add_argument("action", metavar="ACTION", choices=tuple(ACTIONS), help=", ".join(ACTIONS))
    parser.add_argument(
        "--instance", metavar="NAME", required=True, type=shared_options.instance_name, help="the instance's name"
    )
    shared_options.add_fleet(parser)
    parser.add_argument("--node", metavar="NODE", type=shared_options.instance_name, help="of hold and release")
    parser.add_argument(
        "--for", metavar="TIME", dest="duration", type=_duration, help="of hold: 90s, 30m, 2h or 1d (default: for good)"
    )
    parser.add_argument("--note", metavar="TEXT", type=shared_options.note, default="", help="the reason")
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=shared_options.seconds,
        default=DEFAULT_WAIT_S,
        help="of resume: for each wave",
    )
    shared_options.add_wave_options(parser)
    shared_options.add_json(parser)
    parser.set_defaults(run=run, acts=True)


def _duration(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        message = f"{text!r} is not a duration; give 90s, 30m, 2h or 1d"
        raise argparse.ArgumentTypeError(message)
    return float(match[1]) * _SECONDS[match[2]]


def run(arguments: argparse.Namespace) -> int:
    """Do it, print; the exit code."""
    from kvcached.control.commands.set_fleet import open_fleet  # noqa: PLC0415 - needs optional packages

    if arguments.action in {"hold", "release"}:
        if arguments.node is None:
            arguments.parser.error(f"{arguments.action} needs --node")
        with open_fleet(arguments) as operator:
            return _hold(operator, arguments)
    with open_fleet(arguments) as operator:
        stored = operator.read().documents.get(arguments.instance)
        if stored is None:
            problem = f"the fleet has no document for {arguments.instance}"
            complain(problem)
            return exit_codes.UNAVAILABLE
        return _act(operator, stored, arguments)


def _hold(operator: FleetOperator, arguments: argparse.Namespace) -> int:
    from kvcached.fleet.store import Hold  # noqa: PLC0415 - as above

    until = None if arguments.duration is None else time.time() + arguments.duration
    holds = arguments.action == "hold"
    operator.hold(arguments.node, arguments.instance, Hold(arguments.note, until) if holds else None)
    if arguments.json:
        print(json.dumps({"node": arguments.node, "instance": arguments.instance, "held": holds, "until": until}))
    else:
        say(f"{'held' if holds else 'released'}: {arguments.instance} on {arguments.node}")
    return exit_codes.OK


def _act(operator: FleetOperator, stored: Stored, arguments: argparse.Namespace) -> int:
    from kvcached.control.commands.set_fleet import exit_code, print_result  # noqa: PLC0415 - as above
    from kvcached.fleet.document import DocumentError  # noqa: PLC0415 - as above

    try:
        result = _result(operator, stored, arguments)
    except DocumentError as error:
        complain(str(error))
        return exit_codes.SUPERSEDED
    if arguments.json:
        print(json.dumps(result.to_dict()))
    elif arguments.action == "unset" and result.accepted:
        say(f"unset: {arguments.instance}; engines keep what they have")
    else:
        print_result(result)
    return exit_code(result)


def _result(operator: FleetOperator, stored: Stored, arguments: argparse.Namespace) -> FleetResult:
    """Return what became of an action on a document. Raises DocumentError where there is no roll-out."""
    from kvcached.control.commands.set_fleet import drive, result_of  # noqa: PLC0415 - as above
    from kvcached.fleet.fleet_result import FleetResult  # noqa: PLC0415 - as above
    from kvcached.fleet.operations import advanced, rolled_back  # noqa: PLC0415 - as above
    from kvcached.fleet.rollout import WaveOptions  # noqa: PLC0415 - as above
    from kvcached.ledger.results import PublicationStatus  # noqa: PLC0415 - as above

    revision, name = int(stored.revision), arguments.instance
    fields = {} if stored.desired is None else dict(stored.desired.fields)
    tokens = -1 if stored.desired is None else stored.desired.rules.tokens.limit_tokens
    nothing = FleetResult(PublicationStatus.UNAVAILABLE, name, "limit", -1 if tokens is None else tokens)
    if arguments.action == "resume":
        options = WaveOptions(arguments.wait, arguments.soak, arguments.check or "")
        started = FleetResult(PublicationStatus.ACCEPTED, name, "limit", nothing.limit_tokens, revision)
        return drive(operator, started, options, quiet=arguments.json)
    if arguments.action == "unset":
        return result_of(operator.write(name, None, revision), nothing)
    before = rolled_back(fields, arguments.note)  # also says so where there is no roll-out
    pauses = arguments.action == "pause"
    new = advanced(fields, state="paused", why=arguments.note or "by an operator") if pauses else before
    if new is not None and not pauses:
        nothing = FleetResult(PublicationStatus.UNAVAILABLE, name, "limit", new.get("limit_tokens", -1))
    return result_of(operator.write(name, new, revision), nothing)
