"""``set`` and ``cap`` with ``--fleet``: write what an instance name should keep on all nodes, and wait for it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from kvcached.control import exit_codes
from kvcached.control.commands.publishing_options import DEFAULT_WAIT_S
from kvcached.control.rendering.text import complain, say
from kvcached.fleet.document import DocumentError
from kvcached.fleet.fleet_result import FleetResult
from kvcached.fleet.fleet_url import FLEET_VARIABLE, parse_fleet_url
from kvcached.fleet.fleet_waiting import wait_for_fleet
from kvcached.fleet.operations import with_rollout, with_tokens
from kvcached.fleet.rollout import RolloutDriver, WaveOptions
from kvcached.fleet.sources import open_operator
from kvcached.fleet.store import Stored
from kvcached.instance_patterns import is_pattern
from kvcached.ledger.results import PublicationStatus
from kvcached.limits import Amount, format_limit
from kvcached.settings import SettingsError
from kvcached.values import Bound

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from kvcached.fleet.etcd.etcd_operator import FleetOperator
    from kvcached.fleet.fleet_view import FleetView
    from kvcached.fleet.operations import WriteOutcome


def run_fleet(arguments: argparse.Namespace) -> int:
    """Write, wait, print; the exit code."""
    _check(arguments)
    with open_fleet(arguments) as operator:
        view = operator.read()
        names = _names(arguments, view)
        results = [_set(operator, view, name, arguments) for name in names]
    if arguments.json:
        whole = {"results": [result.to_dict() for result in results]}
        print(json.dumps(whole if is_pattern(arguments.instance) else results[0].to_dict()))
    else:
        for result in results:
            print_result(result)
    return max((exit_code(result) for result in results), default=exit_codes.UNAVAILABLE)


def open_fleet(arguments: argparse.Namespace) -> FleetOperator:
    """Return the operator of the fleet that was given, or that the environment names. Raises SettingsError."""
    try:
        return open_operator(parse_fleet_url(arguments.fleet or os.environ.get(FLEET_VARIABLE)))
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what only an engine's own ledger can answer."""
    local = {
        "--ledger-dir": arguments.ledger_dir,
        "--of-max": arguments.of_max,
        "--dry-run": arguments.dry_run,
        "--if-incarnation": arguments.if_incarnation,
    }
    given = [option for option, value in local.items() if value]
    if given:
        arguments.parser.error(f"{given[0]} is about one engine and cannot be used with --fleet")
    if isinstance(arguments.limit, Amount):
        arguments.parser.error(f"{arguments.limit.text} depends on each engine; give tokens with --fleet")
    if is_pattern(arguments.instance) and (arguments.if_revision is not None or arguments.waves):
        arguments.parser.error("--if-revision and --waves need one instance name")


def _names(arguments: argparse.Namespace, view: FleetView) -> list[str]:
    if not is_pattern(arguments.instance):
        return [arguments.instance]
    names = [name for name in view.names if fnmatchcase(name, arguments.instance)]
    if not names:
        complain(
            f"unavailable: no instance of the fleet matches {arguments.instance!r}; name one to write its document"
        )
    return names


def _set(operator: FleetOperator, view: FleetView, name: str, arguments: argparse.Namespace) -> FleetResult:
    stored = view.documents.get(name, Stored("0", None))
    revision = int(stored.revision)
    nothing = FleetResult(PublicationStatus.UNAVAILABLE, name, arguments.bound.value, arguments.limit)
    problem = _problem(stored, arguments)
    if problem:
        return replace(nothing, status=PublicationStatus.SUPERSEDED, stored=revision, warnings=(problem,))
    old = stored.desired.fields if stored.desired else None
    fields = _fields(old, arguments)
    if arguments.if_different and old is not None and _says(fields) == _says(old):
        written = replace(nothing, status=PublicationStatus.ACCEPTED, revision=revision, unchanged=True)
    else:
        written = result_of(operator.write(name, fields, revision), nothing)
    if not written.accepted:
        return written
    if arguments.waves and not written.unchanged:
        return _roll_out(operator, written, arguments)
    if not view.live(name):
        text = f"no live engine of the fleet is named {name}; those that start take it"
        written = replace(written, warnings=(*written.warnings, text))
    return written if arguments.wait is None else _wait(operator, view, written, arguments)


def _problem(stored: Stored, arguments: argparse.Namespace) -> str:
    """Return why this write must not replace what is stored, or an empty text."""
    if arguments.if_revision is not None and int(stored.revision) != arguments.if_revision:
        return f"the document's revision is {stored.revision}, not {arguments.if_revision}: nothing was written"
    if stored.error is not None:
        return f"the stored document cannot be read ({stored.error}): nothing was written; fleet unset removes it"
    rollout = stored.desired.rollout if stored.desired else None
    if arguments.waves and rollout is not None and rollout.state != "done":
        return f"a roll-out is {rollout.state}: nothing was written; fleet resume or fleet rollback ends it"
    return ""


def _fields(old: Mapping[str, Any] | None, arguments: argparse.Namespace) -> dict[str, Any]:
    try:
        labels = dict(arguments.where or ())
        fields = with_tokens(old, arguments.bound, arguments.limit, labels, arguments.note)
    except DocumentError as error:
        raise SettingsError(str(error)) from error
    return with_rollout(fields, old, arguments.waves, arguments.max_failed or 0) if arguments.waves else fields


def _says(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a document says to engines, without who wrote it and when."""
    said = {key: value for key, value in fields.items() if key not in {"id", "by", "at", "note"}}
    return {**said, "where": said.get("where", [])}


def result_of(outcome: WriteOutcome, nothing: FleetResult) -> FleetResult:
    """Return what became of a write, ``nothing`` being the result of none."""
    if outcome.revision:
        return replace(nothing, status=PublicationStatus.ACCEPTED, revision=outcome.revision)
    if outcome.failed or outcome.unknown:
        known = "it is unknown whether it was written: " if outcome.unknown else ""
        return replace(nothing, warnings=(f"{known}{outcome.reason}",))
    text = f"another write came first (r{outcome.stored}): nothing was written"
    return replace(nothing, status=PublicationStatus.SUPERSEDED, stored=outcome.stored, warnings=(text,))


def _wait(operator: FleetOperator, view: FleetView, written: FleetResult, arguments: argparse.Namespace) -> FleetResult:
    name = written.instance_name
    wait = wait_for_fleet(
        operator.read, name, str(written.revision), arguments.wait, expect=arguments.expect or 1, known=view.live(name)
    )
    return replace(written, wait=wait)


def _roll_out(operator: FleetOperator, written: FleetResult, arguments: argparse.Namespace) -> FleetResult:
    options = WaveOptions(arguments.wait or DEFAULT_WAIT_S, arguments.soak, arguments.check or "")
    return drive(operator, written, options, quiet=arguments.json)


def drive(operator: FleetOperator, written: FleetResult, options: WaveOptions, *, quiet: bool) -> FleetResult:
    """Drive the roll-out of a document that was written; the result with how it ended."""
    driver = RolloutDriver(operator, written.instance_name, options, _silent if quiet else complain)
    end = driver.drive(written.revision)
    text = f"{end.state}: {end.why}" if end.why else end.state
    statuses = {
        "done": PublicationStatus.ACCEPTED,
        "paused": PublicationStatus.PARTIAL,
        "superseded": PublicationStatus.SUPERSEDED,
    }
    status = statuses.get(end.state, PublicationStatus.UNAVAILABLE)
    return replace(written, status=status, revision=end.revision, rollout=text, wait=end.wait)


def _silent(_line: str) -> None:
    """Say nothing: with --json there is one object."""


def exit_code(result: FleetResult) -> int:
    """Return the exit code of a result."""
    if result.wait is None or result.rollout or not result.accepted:
        return exit_codes.OF_STATUS[result.status]
    wait = result.wait
    causes = (
        (wait.superseded, exit_codes.SUPERSEDED),
        (bool(wait.refusing), exit_codes.REJECTED),
        (bool(wait.lagging), exit_codes.TIMED_OUT),
        (bool(wait.lost), exit_codes.PARTIAL),
        (not wait.enough and not wait.applied, exit_codes.UNAVAILABLE),
        (not wait.enough, exit_codes.TIMED_OUT),
    )
    return next((code for holds, code in causes if holds), exit_codes.OK)


def print_result(result: FleetResult) -> None:
    """Say what became of a write."""
    cap = "cap " if result.bound == Bound.CAP.value else ""
    what = f"{cap}{format_limit(result.limit_tokens)} for {result.instance_name}"
    wait = result.wait
    if result.accepted:
        verb = "unchanged" if result.unchanged else "accepted"
        targets = "" if wait is None or result.rollout else f", applied by {len(wait.applied)} target(s)"
        after = "" if wait is None or result.rollout else f" after {wait.waited_s:.3f} s"
        say(f"{verb} r{result.revision}: {what}{targets}{after}")
    else:
        complain(f"{result.status}: {what}")
    if result.rollout:
        complain(f"roll-out {result.rollout}")
    for warning in result.warnings:
        complain(warning)
    if wait is not None and not result.rollout:
        for one in wait.refusing:
            complain(f"{one.node} will not apply it: {one.status.state}: {one.status.reason}")
        for one in wait.lagging:
            complain(f"{one.node} has not applied it: {one.status.state} at r{one.status.observed} {one.status.reason}")
        for one in wait.lost:
            complain(f"{one.node} was lost during the wait")
        if wait.superseded:
            complain("a newer document decides")
        elif not wait.enough:
            complain(f"only {len(wait.applied)} target(s) after {wait.waited_s:.1f} s")
