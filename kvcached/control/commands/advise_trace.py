"""``kvcached-control advise --trace``: the curve of recorded traffic, without an engine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvcached.control import exit_codes
from kvcached.control.queries.recommendation import Advice, Goal, advise_recorded, limit_phrase
from kvcached.control.queries.recorded_traffic import RecordedTraffic, read_recorded
from kvcached.control.rendering.curve_text import curve_lines
from kvcached.control.rendering.text import complain, say, width_of
from kvcached.workload.trace import TraceError

if TYPE_CHECKING:
    import argparse


def advise_trace(arguments: argparse.Namespace, goal: Goal) -> int:
    """Read, replay, print; the exit code."""
    if arguments.window or arguments.plot:
        arguments.parser.error("--window and --plot are of a running engine; leave them out with --trace")
    try:
        traffic = read_recorded(arguments.trace, arguments.block_tokens)
    except TraceError as error:
        complain(str(error))
        return exit_codes.USAGE
    advice = advise_recorded(traffic.curve, goal, traffic.requests, traffic.prompt_tokens, traffic.block_tokens)
    if arguments.json:
        print(json.dumps({"trace": arguments.trace, "block_tokens": traffic.block_tokens, **_fields(advice)}))
    else:
        _print(traffic, advice, goal)
    if advice.refused:
        complain(f"no advice: {advice.refused}")
    return exit_codes.PROBLEM if advice.refused else exit_codes.OK


def _fields(advice: Advice) -> dict[str, object]:
    """Return the JSON form, without what only an engine has."""
    left_out = {"replica", "limit_tokens", "measured_hit_rate", "model_error", "in_use_tokens", "capacity_tokens"}
    return {name: value for name, value in advice.to_dict().items() if name not in left_out}


def _print(traffic: RecordedTraffic, advice: Advice, goal: Goal) -> None:
    say(f"{traffic.name}  {traffic.requests:,} requests, {traffic.prompt_tokens:,} prompt tokens")
    say(f"  attainable  {advice.attainable or 0.0:.3f}  in {traffic.curve.room_tokens:,} tokens, which keep everything")
    if advice.advised_limit_tokens is not None:
        say(f"  advice      {advice.wanted or 0.0:.3f}  {limit_phrase(advice)} for {goal.describe()}")
    for warning in advice.warnings:
        say(f"  {warning}")
    print("\n".join(curve_lines(advice, width_of(sys.stdout))))
