"""``kvcached-control set``: publish a limit to one instance or to several, and wait for it if asked to.

What ``run`` does with limits it does with caps, for ``kvcached-control cap``.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext

from kvcached.control import exit_codes
from kvcached.control.api import stopped_waiting
from kvcached.control.commands import publishing_options, shared_options
from kvcached.control.commands.publishing_options import DEFAULT_WAIT_S
from kvcached.control.ending_signals import code_of, raising_signals
from kvcached.control.rendering.text import complain, say
from kvcached.instance_patterns import is_pattern
from kvcached.ledger.publication import publish
from kvcached.light_dataclasses import replace
from kvcached.limits import Amount, format_limit
from kvcached.settings import SettingsError, choose_ledger_dir
from kvcached.values import Bound

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvcached.control.rendering.progress_bar import Shrinking
    from kvcached.ledger.results import MemberResult, PublicationResult

USAGE = "%(prog)s LIMIT --instance NAME [options]"

EPILOG = f"""\
examples:
  kvcached-control set 16k --instance my-model --wait
  kvcached-control set 50%% --instance my-model
  kvcached-control set none --instance 'chat-*' --dry-run
  kvcached-control set unlimited --all --note "night shift"
  kvcached-control set --of-max 0.9 --instance my-model
{publishing_options.EXIT_CODES}"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    text = "change how many idle tokens an instance keeps"
    parser = commands.add_parser("set", help=text, usage=USAGE, epilog=EPILOG)
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument(
        "limit", metavar="LIMIT", nargs="?", type=shared_options.limit, help=publishing_options.LIMIT_HELP
    )
    limits.add_argument(
        "--of-max",
        metavar="F",
        type=shared_options.share,
        help="the smallest limit for this share of the attainable hit rate",
    )
    publishing_options.add(parser)
    parser.set_defaults(run=run, acts=True, bound=Bound.LIMIT)


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
        arguments.limit, arguments.wait = arguments.wait.limit, DEFAULT_WAIT_S
    elif not given:
        after = " before --wait" if arguments.wait is not None else ""
        command, either = arguments.bound.value, ""
        if arguments.bound is Bound.LIMIT:
            command, either = "set", " or --of-max"
        arguments.parser.error(f"LIMIT{either} is missing; write, for example, {command} 16k{after}")


def _run(arguments: argparse.Namespace, directory: str) -> int:
    if arguments.fleet is not None:
        from kvcached.control.commands.set_fleet import run_fleet  # noqa: PLC0415 - only when asked for

        return run_fleet(arguments)
    if arguments.where or arguments.waves or arguments.expect or arguments.check:
        arguments.parser.error("--where, --waves, --check and --expect need --fleet")
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
    limits = dict.fromkeys(names, arguments.limit)
    if isinstance(arguments.limit, Amount):
        from kvcached.control.commands.amounts import take_amount  # noqa: PLC0415 - only for percent and bytes

        resolved = take_amount(arguments.limit, names, directory)
        if isinstance(resolved, int):
            return resolved
        limits = resolved
    if arguments.dry_run:
        from kvcached.control.commands.set_dry_run import run_dry  # noqa: PLC0415 - only when asked for

        return run_dry(arguments, limits, directory)
    return _run_on(arguments, limits, directory)


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


def _run_on(arguments: argparse.Namespace, limits: Mapping[str, int], directory: str) -> int:
    """Publish to all of them before waiting for any."""
    started = time.monotonic()
    results = [
        publish(
            limit,
            name,
            directory,
            bound=arguments.bound,
            if_revision=arguments.if_revision,
            if_incarnation=arguments.if_incarnation,
            if_different=arguments.if_different,
            note=arguments.note,
        )
        for name, limit in limits.items()
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
        from kvcached.ledger.waiting import wait_until_applied  # noqa: PLC0415

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
    limit = _format_bound(result)
    unchanged = "unchanged, " if result.unchanged else ""
    if result.applied:
        after = f"after {result.waited_s:.3f} s"
        say(f"{unchanged}applied r{result.revision}: {limit}, by all replicas of {name} {after}")
    elif result.accepted:
        say(f"{unchanged}accepted r{result.revision}: {limit}, in {len(result.gpus)} member(s) of {name}")
    problems = _problems(result, f"{result.status}: {limit} for {name}")
    if problems:
        complain("; ".join(problems))


def _format_bound(result: PublicationResult) -> str:
    """Return what was published for people: a cap says that it is one."""
    return f"{'cap ' if result.bound is Bound.CAP else ''}{format_limit(result.limit_tokens)}"


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
