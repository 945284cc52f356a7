"""``kvcached-control balance --traces``: how a budget would be divided among recorded workloads, without an engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvcached.balance.budget import Budget
from kvcached.balance.decision import Decision, Verdict, decide
from kvcached.balance.decision_json import decision_fields
from kvcached.balance.rules import FLOOR_OF_EQUAL, Rules
from kvcached.balance.standing import Party, Standing
from kvcached.balance.terms import Terms
from kvcached.balance.worth import Worth
from kvcached.control import exit_codes
from kvcached.control.queries.recorded_traffic import RecordedTraffic, read_recorded
from kvcached.control.rendering.balance_text import decision_table
from kvcached.control.rendering.text import complain
from kvcached.settings import check_instance_name
from kvcached.workload.trace import TraceError

if TYPE_CHECKING:
    import argparse


def divide_traces(arguments: argparse.Namespace) -> int:
    """Read, divide, print; the exit code. Every trace has the name of its file, up to the first dot."""
    budget = _budget(arguments)
    try:
        found = [read_recorded(path, arguments.block_tokens) for path in arguments.traces]
    except TraceError as error:
        complain(str(error))
        return exit_codes.USAGE
    names = [check_instance_name(traffic.name) for traffic in found]
    if len(set(names)) < len(names):
        arguments.parser.error(f"two traces have one name ({', '.join(names)}); names are those of the files")
    terms = Terms("", tuple(names), budget, floors=dict(arguments.floor), weights=dict(arguments.weight))
    decision = _divide(found, terms)
    if arguments.json:
        print(json.dumps(decision_fields(decision, terms, None)))
    else:
        print("\n".join(decision_table(decision, terms, dry=True)))
    return exit_codes.PROBLEM if decision.verdict is Verdict.REFUSED else exit_codes.OK


def _budget(arguments: argparse.Namespace) -> Budget:
    if arguments.budget is None or arguments.budget[1] or arguments.total:
        arguments.parser.error("--traces divides a budget in tokens; write, for example, --budget 2m")
    return Budget(arguments.budget[0], in_bytes=False)


def _divide(found: list[RecordedTraffic], terms: Terms) -> Decision:
    """Return the best division beside the equal one, from which it starts."""
    equal = terms.budget.size // len(found)
    parties = [_party(traffic, equal, terms) for traffic in found]
    return decide(parties, terms.budget.size, Rules())


def _party(traffic: RecordedTraffic, equal: int, terms: Terms) -> Party:
    limit = equal // traffic.block_tokens * traffic.block_tokens
    return Party(
        traffic.name,
        Standing.BALANCED,
        "",
        limit,
        limit_tokens=limit,
        floor_tokens=terms.floors.get(traffic.name, int(equal * FLOOR_OF_EQUAL)),
        block_tokens=traffic.block_tokens,
        traffic=traffic.prompt_tokens / max(traffic.seconds, 1.0),
        weight=terms.weights.get(traffic.name, 1.0),
        worth=Worth(((traffic.curve, 1.0),)),
    )
