"""``kvcached-control set``: publish a limit to one instance or to several, and wait for it if asked to."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext

from kvcached.control import exits
from kvcached.control.options import add_json, add_ledger_dir, note, seconds, share
from kvcached.control.targets import ANY, check_name_or_pattern, is_pattern, matching_instances
from kvcached.elsewhere import elsewhere
from kvcached.ledger import LedgerDirectoryError
from kvcached.limits import format_limit, parse_limit
from kvcached.publication import publish
from kvcached.settings import SettingsError, choose_ledger_dir

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kvcached.control.progress import Shrinking
    from kvcached.results import MemberResult, PublicationResult

DEFAULT_WAIT_S = 60.0

EPILOG = """\
examples:
  kvcached-control set 16k --instance my-model --wait
  kvcached-control set none --instance 'chat-*' --dry-run
  kvcached-control set unlimited --all --note "night shift"
  kvcached-control set --of-max 0.9 --instance my-model
exit codes:
  0 accepted (with --wait: applied)   2 usage       3 unavailable   4 partial
  5 superseded                        6 timed out   7 the engine refuses it
  of several instances the highest"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("set", help="change how many idle tokens an instance keeps", epilog=EPILOG)
    limits = parser.add_mutually_exclusive_group(required=True)
    limits.add_argument(
        "limit", metavar="LIMIT", nargs="?", type=_limit, help="tokens: 16000, 16k, 2m, unlimited or none"
    )
    limits.add_argument(
        "--of-max", metavar="F", type=share, help="the smallest limit for this share of the attainable hit rate"
    )
    targets = parser.add_mutually_exclusive_group(required=True)
    targets.add_argument(
        "--instance", metavar="NAME", type=_name_or_pattern, help="the engine's name, or a pattern such as 'chat-*'"
    )
    targets.add_argument("--all", action="store_const", const=ANY, dest="instance", help="every live instance")
    add_ledger_dir(parser)
    parser.add_argument(
        "--if-revision", metavar="N", type=int, help="publish only if the instance's highest revision is N"
    )
    parser.add_argument("--note", metavar="TEXT", type=note, default="", help="why, for status --history")
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--wait",
        metavar="SECONDS",
        nargs="?",
        type=seconds,
        const=DEFAULT_WAIT_S,
        help=f"wait until it is applied and the excess evicted (default {DEFAULT_WAIT_S:.0f} s)",
    )
    when.add_argument("--dry-run", action="store_true", help="show what would be evicted, and publish nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def _limit(text: str) -> int:
    import argparse  # noqa: PLC0415 - loaded already: this is called while it parses

    try:
        return parse_limit(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _name_or_pattern(text: str) -> str:
    import argparse  # noqa: PLC0415 - as above

    try:
        return check_name_or_pattern(text)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    """Publish, wait, print; the exit code."""
    directory = choose_ledger_dir(arguments.ledger_dir)
    if arguments.of_max is not None:
        from kvcached.control.advised import take_advice  # noqa: PLC0415 - only when asked for

        code = take_advice(arguments, directory)
        if code is not None:
            return code
    if is_pattern(arguments.instance):
        return _run_on_several(arguments, directory)
    if arguments.dry_run:
        from kvcached.control.dry_run import run_dry  # noqa: PLC0415 - only when asked for

        return run_dry(arguments, [arguments.instance], directory)
    return _run_on(arguments, [arguments.instance], directory)


def _run_on_several(arguments: argparse.Namespace, directory: str) -> int:
    """Look up who is meant, and do for each what is done for one."""
    if arguments.if_revision is not None:
        message = "--if-revision goes with one instance, by its name: each counts its own revisions"
        raise SettingsError(message)
    try:
        names = matching_instances(arguments.instance, directory)
        problem = f"no live instance matches {arguments.instance!r} in {directory}{elsewhere(directory)}"
    except LedgerDirectoryError as error:
        names, problem = [], f"{error}{elsewhere(directory)}"
    if not names:
        if arguments.json:
            print(json.dumps({"results": []}))
        print(f"kvcached-control: unavailable: {problem}", file=sys.stderr)
        return exits.UNAVAILABLE
    if arguments.dry_run:
        from kvcached.control.dry_run import run_dry  # noqa: PLC0415 - only when asked for

        return run_dry(arguments, names, directory)
    return _run_on(arguments, names, directory)


def _run_on(arguments: argparse.Namespace, names: Sequence[str], directory: str) -> int:
    """Publish to all of them before waiting for any."""
    started = time.monotonic()
    results = [
        publish(arguments.limit, name, directory, if_revision=arguments.if_revision, note=arguments.note)
        for name in names
    ]
    if arguments.wait is not None:
        results = [_wait(result, directory, arguments, started) for result in results]
    if arguments.json:
        whole = {"results": [result.to_dict() for result in results]}
        print(json.dumps(whole if is_pattern(arguments.instance) else results[0].to_dict()))
    else:
        for result in results:
            _print_result(result, directory)
    return max(exit_code(result) for result in results)


def _wait(
    result: PublicationResult, directory: str, arguments: argparse.Namespace, started: float
) -> PublicationResult:
    if not result.accepted:
        return _not_waited(result)
    with _progress(json_wanted=arguments.json) as progress:
        from kvcached.control.waiting import wait_until_applied  # noqa: PLC0415 - only who waits pays for its import

        return wait_until_applied(result, directory, arguments.wait, progress, since=started)


def _not_waited(result: PublicationResult) -> PublicationResult:
    """Return what ``--wait`` promises in JSON also where there was nothing to wait for."""
    from dataclasses import replace  # noqa: PLC0415 - only this rare path needs it

    return replace(result, applied=False, waited_s=0.0)


def _progress(*, json_wanted: bool) -> AbstractContextManager[Shrinking | None]:
    """Return a progress display on a terminal; elsewhere nothing, and its library is not even imported."""
    if json_wanted or not sys.stderr.isatty():
        return nullcontext()
    from kvcached.control.progress import shrinking  # noqa: PLC0415 - see above

    return shrinking()


def exit_code(result: PublicationResult) -> int:
    """Return the exit code that a result stands for."""
    if result.applied is None or result.applied or not result.accepted:
        return exits.OF_STATUS[result.status]
    return exits.REJECTED if result.rejections else exits.TIMED_OUT


def _print_result(result: PublicationResult, directory: str) -> None:
    name = f"{result.instance_name} in {directory}"
    limit = format_limit(result.limit_tokens)
    if result.applied:
        print(f"applied r{result.revision}: {limit}, by all replicas of {name} after {result.waited_s:.3f} s")
    elif result.accepted:
        print(f"accepted r{result.revision}: {limit}, in {len(result.gpus)} member(s) of {name}")
    problems = [f"replica {rejection.replica} will not apply it: {rejection.reason}" for rejection in result.rejections]
    if not result.accepted:
        problems.append(f"{result.status}: {limit} for {name}")
        problems += [f"{gpu.gpu}: {gpu.status}{f', {gpu.error}' if gpu.error else ''}" for gpu in _unwritten(result)]
    problems += result.warnings
    if result.applied is False and result.accepted and not result.rejections:
        problems.insert(0, f"not applied after {result.waited_s:.1f} s")
    if problems:
        print(f"kvcached-control: {'; '.join(problems)}", file=sys.stderr)


def _unwritten(result: PublicationResult) -> list[MemberResult]:
    return [gpu for gpu in result.gpus if gpu.status != "published"]
