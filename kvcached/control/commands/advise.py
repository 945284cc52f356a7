"""``kvcached-control advise``: the hit rate over the limit, and the smallest limit for a wanted share of it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvcached.advisor.reading import WINDOWS
from kvcached.control import exit_codes
from kvcached.control.commands.shared_options import add_block_tokens, add_json, add_ledger_dir, instance_name, share
from kvcached.control.queries.recommendation import Advice, Goal, NoInstanceError, advise_instance, limit_phrase
from kvcached.control.rendering.curve_text import curve_lines
from kvcached.control.rendering.text import (
    BAD,
    BUSY,
    FAINT,
    STRONG,
    complain,
    limit_text,
    styled,
    wants_colour,
    width_of,
)
from kvcached.ledger.directory import LedgerDirectoryError
from kvcached.ledger.not_found import not_found_message
from kvcached.ledger.snapshot import take_snapshot
from kvcached.settings import choose_ledger_dir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

DEFAULT_SHARE = 0.9

EPILOG = """\
examples:
  kvcached-control advise --instance my-model
  kvcached-control advise --instance my-model --target 0.6 --window now
  kvcached-control advise --instance my-model --plot curve.png
  kvcached-control advise --trace traffic.jsonl
  kvcached-control set --of-max 0.9 --instance my-model
exit codes:
  0 a limit is advised for every replica   1 none for at least one, and why
  2 wrong usage                            3 no such instance"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "advise", help="predict the hit rate at other limits, and advise a limit", epilog=EPILOG
    )
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--instance", metavar="NAME", type=instance_name, help="the instance's name, if there are several"
    )
    sources.add_argument("--trace", metavar="FILE", help="recorded traffic (Mooncake format) instead of an engine")
    add_block_tokens(parser)
    goals = parser.add_mutually_exclusive_group()
    goals.add_argument(
        "--of-max", metavar="F", type=share, help=f"a share of the attainable hit rate (default {DEFAULT_SHARE})"
    )
    goals.add_argument("--target", metavar="F", type=share, help="a hit rate")
    parser.add_argument(
        "--window",
        choices=WINDOWS,
        help="the last few million prompt tokens, or many more (default: long, or now while traffic is changing)",
    )
    add_ledger_dir(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw the curve into FILE (needs matplotlib)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read, print, draw; the exit code."""
    directory = choose_ledger_dir(arguments.ledger_dir)
    goal = goal_of(arguments.of_max, arguments.target)
    if arguments.trace is not None:
        from kvcached.control.commands.advise_trace import advise_trace  # noqa: PLC0415 - only when asked for

        return advise_trace(arguments, goal)
    try:
        name = arguments.instance or _only_instance(directory)
        advices = advise_instance(name, directory, goal, arguments.window)
    except (NoInstanceError, LedgerDirectoryError) as error:
        complain(f"unavailable: {error}")
        return exit_codes.UNAVAILABLE
    if arguments.json:
        print(json.dumps({"instance": name, "replicas": [advice.to_dict() for advice in advices]}))
    else:
        for advice in advices:
            _print(name, advice, goal, alone=len(advices) == 1, plot=not arguments.plot)
    for advice in advices:
        if advice.refused and (arguments.json or not sys.stdout.isatty()):  # on a terminal it was said just above
            complain(f"no advice for replica {advice.replica}: {advice.refused}")
    code = exit_codes.PROBLEM if any(advice.refused for advice in advices) else exit_codes.OK
    return max(code, _draw(arguments.plot, name, advices)) if arguments.plot else code


def goal_of(of_max: float | None, target: float | None) -> Goal:
    """Return what was asked for."""
    return Goal(rate=target) if target is not None else Goal(share=DEFAULT_SHARE if of_max is None else of_max)


def _only_instance(directory: str) -> str:
    snapshot = take_snapshot(directory)
    names = snapshot.names
    if len(names) != 1:
        several = f"there are {', '.join(names)} in {directory}; name one with --instance"
        raise NoInstanceError(several if names else not_found_message(snapshot))
    return names[0]


def _print(name: str, advice: Advice, goal: Goal, *, alone: bool, plot: bool) -> None:
    colour = wants_colour(sys.stdout)
    title = name if alone else f"{name}/{advice.replica}"
    seen = f"{advice.requests:,} requests, {advice.observed_tokens:,} prompt tokens"
    print(f"{styled(title, STRONG, colour=colour)}  {styled(seen, FAINT, colour=colour)}")
    curve = advice.curve
    if curve is not None:
        limit = limit_text(-1 if advice.limit_tokens is None else advice.limit_tokens)
        expected = f"model {curve.measured - curve.model_error:.3f}, off by {curve.model_error:+.3f}"
        _line("measured", curve.measured, f"window {advice.window}, limit {limit}; {expected}")
        _line("in use", curve.values[0], "shared by requests in progress; needs no idle cache")
        _line(
            "attainable",
            advice.attainable,
            f"in the {limit_text(curve.room_tokens)} tokens that running requests do not use",
        )
    if advice.advised_limit_tokens is not None:
        _line("advice", advice.wanted, f"{styled(limit_phrase(advice), STRONG, colour=colour)} for {goal.describe()}")
    for warning in advice.warnings:
        print(f"  {styled(warning, BUSY, colour=colour)}")
    if advice.refused:
        print(f"  {styled('no advice: ' + advice.refused, BAD, colour=colour)}")
    if plot:
        print("\n".join(curve_lines(advice, width_of(sys.stdout))))


def _line(label: str, rate: float | None, text: str) -> None:
    print(f"  {label:<11}{'' if rate is None else f'{rate:.3f}':>6}  {text}")


def _draw(path: str, name: str, advices: Sequence[Advice]) -> int:
    try:
        from kvcached.control.rendering.curve_picture import draw_curves  # noqa: PLC0415 - loads matplotlib
    except ImportError as error:
        complain(f"--plot needs matplotlib ({error}); pip install matplotlib")
        return exit_codes.PROBLEM
    try:
        draw_curves(path, name, advices)
    except (OSError, ValueError) as error:  # as for a kind of picture that it does not know
        complain(f"--plot cannot write {path}: {error}")
        return exit_codes.PROBLEM
    return exit_codes.OK
