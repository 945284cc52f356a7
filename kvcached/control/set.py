"""``kvcached-control set``: publish a limit, and wait for it if asked to."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

from kvcached.control import exits
from kvcached.control.limits import format_limit, parse_limit
from kvcached.control.options import add_json, add_ledger_dir, instance_name, seconds
from kvcached.control.waiting import wait_until_applied
from kvcached.publication import publish
from kvcached.settings import choose_ledger_dir

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import argparse
    from contextlib import AbstractContextManager

    from kvcached.control.progress import Shrinking
    from kvcached.publication import MemberResult, PublicationResult

DEFAULT_WAIT_S = 60.0

EPILOG = """\
example:
  kvcached-control set 16k --instance my-model --wait
exit codes:
  0 accepted (with --wait: applied)   2 usage      3 unavailable   4 partial
  5 superseded                        6 timed out  7 the engine will not apply it"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("set", help="change how many idle tokens an instance keeps", epilog=EPILOG)
    parser.add_argument("limit", metavar="LIMIT", type=_limit, help="tokens: 16000, 16k, 2m, unlimited or none")
    parser.add_argument("--instance", metavar="NAME", required=True, type=instance_name, help="the engine's name")
    add_ledger_dir(parser)
    parser.add_argument(
        "--if-revision", metavar="N", type=int, help="publish only if the instance's highest revision is N"
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        nargs="?",
        type=seconds,
        const=DEFAULT_WAIT_S,
        help=f"wait until it is applied and the excess evicted (default {DEFAULT_WAIT_S:.0f} s)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _limit(text: str) -> int:
    import argparse  # noqa: PLC0415 - loaded already: this is called while it parses

    try:
        return parse_limit(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    """Publish, wait, print; the exit code."""
    directory = choose_ledger_dir(arguments.ledger_dir)
    result = publish(arguments.limit, arguments.instance, directory, if_revision=arguments.if_revision)
    if arguments.wait is not None and result.accepted:
        with _progress(json_wanted=arguments.json) as progress:
            result = wait_until_applied(result, directory, arguments.wait, progress)
    elif arguments.wait is not None:
        result = _not_waited(result)
    if arguments.json:
        print(json.dumps(result.to_dict()))
    else:
        _print_result(result, directory)
    return exit_code(result)


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
