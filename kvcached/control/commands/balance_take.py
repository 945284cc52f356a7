"""``kvcached-control balance --take``: what was set by hand is given back to the budget, at the limit that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.balance.terms import mark_of
from kvcached.control import exit_codes
from kvcached.control.rendering.text import complain, say
from kvcached.ledger.not_found import not_found_message
from kvcached.ledger.publication import publish
from kvcached.ledger.replicas import desired_pairs
from kvcached.ledger.snapshot import take_snapshot
from kvcached.limits import format_limit
from kvcached.settings import choose_ledger_dir
from kvcached.values import Bound

if TYPE_CHECKING:
    import argparse


def take(arguments: argparse.Namespace) -> int:
    """Publish the newest limit (or cap) of an instance again, under the budget's name; the exit code."""
    directory, name = choose_ledger_dir(arguments.ledger_dir), arguments.take
    bound = Bound.CAP if arguments.total else Bound.LIMIT
    snapshot = take_snapshot(directory)
    told = desired_pairs(snapshot.of(name).replicas, bound)
    if not told:
        complain(f"unavailable: {not_found_message(snapshot, name)}")
        return exit_codes.UNAVAILABLE
    newest = max(told, key=lambda pair: pair.revision)
    result = publish(
        newest.limit_tokens,
        name,
        directory,
        bound=bound,
        if_revision=newest.revision,
        note=f"{mark_of(arguments.name)}taken",
    )
    if not result.accepted:
        complain(f"{result.status}: {'; '.join(result.warnings)}")
    else:
        say(f"{name} is given to budget {arguments.name} at {format_limit(result.limit_tokens)} (r{result.revision})")
    return exit_codes.OF_STATUS[result.status]
