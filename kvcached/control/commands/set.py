"""``kvcached-control set``: publish a limit to one instance or to several, and wait for it if asked to."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext

from kvcached.control import exit_codes
from kvcached.control.api import stopped_waiting
from kvcached.control.commands import shared_options
from kvcached.control.ending_signals import code_of, raising_signals
from kvcached.control.queries.instance_patterns import ANY, check_name_or_pattern, is_pattern
from kvcached.control.rendering.text import complain, say
from kvcached.ledger.publication import publish
from kvcached.light_dataclasses import replace
from kvcached.limits import format_limit
from kvcached.settings import SettingsError, choose_ledger_dir

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kvcached.control.rendering.progress_bar import Shrinking
    from kvcached.ledger.results import MemberResult, PublicationResult

DEFAULT_WAIT_S = 60.0

USAGE = "%(prog)s LIMIT --instance NAME [options]"

EPILOG = """\
examples:
  kvcached-control set 16k --instance my-model --wait
  kvcached-control set none --instance 'chat-*' --dry-run
  kvcached-control set unlimited --all --note "night shift"
  kvcached-control set --of-max 0.9 --instance my-model
exit codes:
  0 accepted (with --wait: applied)   2 wrong usage   4 partial
  3 unavailable, or the engine ended or restarted while waiting
  5 superseded                        6 timed out     7 the engine refuses it
  with several instances, the highest of theirs"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    text = "change how many idle tokens an instance keeps"
    parser = commands.add_parser("set", help=text, usage=USAGE, epilog=EPILOG)
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument(
        "limit", metavar="LIMIT", nargs="?", type=shared_options.limit, help="tokens: 16000, 16k, 2m, unlimited or none"
    )
    limits.add_argument(
        "--of-max",
        metavar="F",
        type=shared_options.share,
        help="the smallest limit for this share of the attainable hit rate",
    )
    targets = parser.add_mutually_exclusive_group(required=True)
    targets.add_argument(
        "--instance", metavar="NAME", type=_name_or_pattern, help="the instance's name, or a pattern such as 'chat-*'"
    )
    targets.add_argument("--all", action="store_const", const=ANY, dest="instance", help="every live instance")
    shared_options.add_ledger_dir(parser)
    _add_conditions(parser)
    parser.add_argument(
        "--note", metavar="TEXT", type=shared_options.note, default="", help="the reason, for status --history"
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--wait",
        metavar="SECONDS",
        nargs="?",
        type=shared_options.seconds_or_limit,
        const=DEFAULT_WAIT_S,
        help=f"wait until it is applied and the excess is evicted (default {DEFAULT_WAIT_S:.0f} s)",
    )
    when.add_argument("--dry-run", action="store_true", help="show what would be evicted, and publish nothing")
    shared_options.add_json(parser)
    parser.set_defaults(run=run, acts=True)


def _add_conditions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--if-revision",
        metavar="N",
        type=shared_options.revision,
        help="publish only if the instance's highest revision is N",
    )
    parser.add_argument(
        "--if-incarnation",
        metavar="HEX",
        type=shared_options.incarnation,
        help="publish only if the instance has not restarted since status --json showed this incarnation",
    )
    parser.add_argument(
        "--if-different",
        action="store_true",
        help="publish nothing, and print unchanged, if this limit is already desired everywhere",
    )


def _name_or_pattern(text: str) -> str:
    return shared_options.checked(check_name_or_pattern, text)


def run(arguments: argparse.Namespace) -> int:
    """Publish, wait, print; the exit code."""
    _place_limit(arguments)
    directory = choose_ledger_dir(arguments.ledger_dir)
    with raising_signals():
        try:
            return _run(arguments, directory)
        except KeyboardInterrupt as interrupt:
            complain("interrupted; kvcached-control status shows what was published")
            return code_of(interrupt)


def _place_limit(arguments: argparse.Namespace) -> None:
    """Take a limit that was written after ``--wait`` for what it is, and make sure that there is one."""
    given = arguments.limit is not None or arguments.of_max is not None
    if isinstance(arguments.wait, shared_options.Misplaced):
        if given:
            arguments.parser.error("argument --wait: expected a number of seconds, not a second LIMIT")
        arguments.limit, arguments.wait = arguments.wait.limit_tokens, DEFAULT_WAIT_S
    elif not given:
        after = " before --wait" if arguments.wait is not None else ""
        arguments.parser.error(f"LIMIT or --of-max is missing; write, for example, set 16k{after}")


def _run(arguments: argparse.Namespace, directory: str) -> int:
    if arguments.of_max is not None:
        from kvcached.control.commands.set_of_max import take_advice  # noqa: PLC0415 - only when asked for

        code = take_advice(arguments, directory)
        if code is not None:
            return code
    names = [arguments.instance]
    if is_pattern(arguments.instance):
        names = _matching(arguments, directory)
        if not names:
            return exit_codes.UNAVAILABLE
    if arguments.dry_run:
        from kvcached.control.commands.set_dry_run import run_dry  # noqa: PLC0415 - only when asked for

        return run_dry(arguments, names, directory)
    return _run_on(arguments, names, directory)


def _matching(arguments: argparse.Namespace, directory: str) -> list[str]:
    """Return the live instances that are meant; say so if there are none, or if some could not be looked for."""
    from fnmatch import fnmatchcase  # noqa: PLC0415 - only for a pattern

    from kvcached.ledger.not_found import not_found_message  # noqa: PLC0415
    from kvcached.ledger.snapshot import take_snapshot  # noqa: PLC0415

    if arguments.if_revision is not None or arguments.if_incarnation is not None:
        message = "--if-revision and --if-incarnation need one instance name: each instance counts its own revisions"
        raise SettingsError(message)
    snapshot = take_snapshot(directory)
    names = [name for name in snapshot.names if fnmatchcase(name, arguments.instance)]
    if not names:
        problem = not_found_message(snapshot, arguments.instance, pattern=True)
        if arguments.json:
            print(json.dumps({"results": [], "error": problem}))
        complain(f"unavailable: {problem}")
    else:
        for unseen in snapshot.unseen:
            complain(f"could not be read: {unseen}")
    return names


def _run_on(arguments: argparse.Namespace, names: Sequence[str], directory: str) -> int:
    """Publish to all of them before waiting for any."""
    started = time.monotonic()
    results = [
        publish(
            arguments.limit,
            name,
            directory,
            if_revision=arguments.if_revision,
            if_incarnation=arguments.if_incarnation,
            if_different=arguments.if_different,
            note=arguments.note,
        )
        for name in names
    ]
    interrupt = None
    if arguments.wait is not None:
        results, interrupt = _wait_for_all(results, directory, arguments, started)
    if arguments.json:
        whole = {"results": [result.to_dict() for result in results]}
        print(json.dumps(whole if is_pattern(arguments.instance) else results[0].to_dict()))
    else:
        for result in results:
            _print_result(result, directory)
    return code_of(interrupt) if interrupt else max(exit_code(result) for result in results)


def _wait_for_all(
    results: Sequence[PublicationResult], directory: str, arguments: argparse.Namespace, started: float
) -> tuple[list[PublicationResult], KeyboardInterrupt | None]:
    """Wait for each; after an interrupt, which is returned, for none of the others."""
    waited: list[PublicationResult] = []
    try:
        for result in results:
            waited.append(_wait(result, directory, arguments, started))  # noqa: PERF401 - what is done so far counts
    except KeyboardInterrupt as interrupt:
        rest = results[len(waited) :]
        waited += [stopped_waiting(result, started) if result.accepted else _not_waited(result) for result in rest]
        return waited, interrupt
    return waited, None


def _wait(
    result: PublicationResult, directory: str, arguments: argparse.Namespace, started: float
) -> PublicationResult:
    if not result.accepted:
        return _not_waited(result)
    with _progress(json_wanted=arguments.json) as progress:
        # Only who waits pays for its import.
        from kvcached.control.queries.waiting import wait_until_applied  # noqa: PLC0415

        return wait_until_applied(result, directory, arguments.wait, progress, since=started)


def _not_waited(result: PublicationResult) -> PublicationResult:
    """Return what ``--wait`` promises in JSON also where there was nothing to wait for."""
    return replace(result, applied=False, waited_s=0.0)


def _progress(*, json_wanted: bool) -> AbstractContextManager[Shrinking | None]:
    """Return a progress display on a terminal; elsewhere nothing, and its library is not even imported."""
    if json_wanted or not sys.stderr.isatty():
        return nullcontext()
    from kvcached.control.rendering.progress_bar import shrinking  # noqa: PLC0415 - see above

    return shrinking()


def exit_code(result: PublicationResult) -> int:
    """Return the exit code of a result."""
    if result.applied is None or result.applied or not result.accepted:
        return exit_codes.OF_STATUS[result.status]
    if result.rejections:
        return exit_codes.REJECTED
    return exit_codes.UNAVAILABLE if result.engine_ended else exit_codes.TIMED_OUT


def _print_result(result: PublicationResult, directory: str) -> None:
    name = f"{result.instance_name} in {directory}"
    limit = format_limit(result.limit_tokens)
    unchanged = "unchanged, " if result.unchanged else ""
    if result.applied:
        after = f"after {result.waited_s:.3f} s"
        say(f"{unchanged}applied r{result.revision}: {limit}, by all replicas of {name} {after}")
    elif result.accepted:
        say(f"{unchanged}accepted r{result.revision}: {limit}, in {len(result.gpus)} member(s) of {name}")
    problems = _problems(result, f"{result.status}: {limit} for {name}")
    if problems:
        complain("; ".join(problems))


def _problems(result: PublicationResult, failure: str) -> list[str]:
    problems = [f"replica {rejection.replica} will not apply it: {rejection.reason}" for rejection in result.rejections]
    if not result.accepted:
        problems.append(failure)
        problems += [f"{gpu.gpu}: {gpu.status}{f', {gpu.error}' if gpu.error else ''}" for gpu in _unwritten(result)]
    problems += result.warnings
    if result.applied is False and result.accepted and not result.rejections:
        problems.insert(0, f"not applied after {result.waited_s:.1f} s")
    return problems


def _unwritten(result: PublicationResult) -> list[MemberResult]:
    return [gpu for gpu in result.gpus if gpu.status != "published"]
