"""The options of ``balance``, and the terms that they say."""

from __future__ import annotations

import argparse
import math

from kvcached.balance.budget import Budget
from kvcached.balance.rules import DEFAULT_PERIOD_S
from kvcached.balance.terms import DEFAULT_NAME, Terms
from kvcached.control.commands.shared_options import (
    add_block_tokens,
    add_json,
    add_ledger_dir,
    checked,
    instance_name,
    interval,
)
from kvcached.instance_patterns import check_name_or_pattern
from kvcached.limits import Amount, parse_amount, parse_limit
from kvcached.settings import check_instance_name, choose_ledger_dir
from kvcached.values import Bound

LONGEST_NAME = 24
"""How long a budget's name may be: the notes of its publications begin with it."""

MOST_WEIGHT = 1e6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare all options."""
    parser.add_argument(
        "--instances",
        metavar="NAMES",
        type=_patterns,
        help="the instances that share the budget: names or patterns such as 'chat-*', with commas between them",
    )
    parser.add_argument(
        "--traces", metavar="FILE", nargs="+", help="divide among recorded workloads instead, and publish nothing"
    )
    add_block_tokens(parser)
    parser.add_argument(
        "--budget", metavar="B", type=_budget, help="20GiB or 500MB of KV; or tokens, such as 2m, of engines alike"
    )
    parser.add_argument(
        "--total",
        action="store_true",
        help="divide all KV, in use and idle, by caps; without it idle cache, by limits",
    )
    _add_for_instances(parser)
    parser.add_argument(
        "--name", type=_budget_name, default=DEFAULT_NAME, help=f"the budget's name (default {DEFAULT_NAME})"
    )
    parser.add_argument(
        "--period",
        metavar="S",
        type=interval,
        default=DEFAULT_PERIOD_S,
        help=f"seconds between decisions (default {DEFAULT_PERIOD_S:.0f})",
    )
    parser.add_argument("--once", action="store_true", help="watch for one period, decide once, and end")
    parser.add_argument("--dry-run", action="store_true", help="say what would be decided, and publish nothing")
    add_ledger_dir(parser)
    add_json(parser)


def _add_for_instances(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--floor",
        metavar="NAME=TOKENS",
        action="append",
        default=[],
        type=_floor,
        help="what NAME never falls below (default: a tenth of an equal share)",
    )
    parser.add_argument(
        "--weight",
        metavar="NAME=W",
        action="append",
        default=[],
        type=_weight,
        help="what a prompt token saved for NAME counts (default 1)",
    )
    parser.add_argument(
        "--take",
        metavar="NAME",
        type=instance_name,
        help="give an instance that was set by hand back to the budget, and end",
    )


def terms_of(arguments: argparse.Namespace) -> Terms:
    """Return what the options say; ends with a usage error where one is missing."""
    for option in ("instances", "budget"):
        if getattr(arguments, option) is None:
            arguments.parser.error(f"--{option} is missing; write, for example, --instances 'chat-*' --budget 20GiB")
    bound = Bound.CAP if arguments.total else Bound.LIMIT
    size, in_bytes = arguments.budget
    return Terms(
        choose_ledger_dir(arguments.ledger_dir),
        arguments.instances,
        Budget(size, in_bytes, bound),
        arguments.name,
        arguments.period,
        dict(arguments.floor),
        dict(arguments.weight),
    )


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(checked(check_name_or_pattern, part.strip()) for part in text.split(","))


def _budget(text: str) -> tuple[int, bool]:
    amount = checked(parse_amount, text)
    size = amount.size_bytes if isinstance(amount, Amount) else amount
    if size <= 0:
        message = f"{text!r} is not a budget; give bytes such as 20GiB, or tokens such as 2m"
        raise argparse.ArgumentTypeError(message)
    return size, isinstance(amount, Amount)


def _budget_name(text: str) -> str:
    name = checked(check_instance_name, text)
    if len(name) > LONGEST_NAME:
        message = f"{text!r} is too long; a budget's name has up to {LONGEST_NAME} characters"
        raise argparse.ArgumentTypeError(message)
    return name


def _floor(text: str) -> tuple[str, int]:
    name, _, tokens = text.partition("=")
    floor = checked(parse_limit, tokens)
    if floor < 0:
        message = f"{text!r}: a floor cannot be unlimited"
        raise argparse.ArgumentTypeError(message)
    return checked(check_instance_name, name), floor


def _weight(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= MOST_WEIGHT:
        message = f"{text!r} is not a weight; give a number above 0, such as {name or 'NAME'}=10"
        raise argparse.ArgumentTypeError(message)
    return checked(check_instance_name, name), weight
