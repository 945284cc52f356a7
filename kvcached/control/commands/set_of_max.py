"""``kvcached-control set --of-max``: the limit comes from the advisor, is shown, and is in the record."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvcached.arguments import MAX_NOTE_BYTES
from kvcached.control import exit_codes
from kvcached.control.queries.recommendation import Goal, NoInstanceError, advise_instance, limit_phrase
from kvcached.control.rendering.text import complain
from kvcached.instance_patterns import is_pattern
from kvcached.ledger.directory import LedgerDirectoryError
from kvcached.ledger.results import PublicationResult, PublicationStatus
from kvcached.settings import SettingsError

if TYPE_CHECKING:
    import argparse


def take_advice(arguments: argparse.Namespace, directory: str) -> int | None:
    """Put the advised limit and a note of it into ``arguments``; return an exit code if there is no advice.

    Replicas are told one limit, so it is the largest one that is advised for any of them.
    """
    if is_pattern(arguments.instance):
        message = "--of-max needs one instance name: each instance has its own traffic"
        raise SettingsError(message)
    goal = Goal(share=arguments.of_max)
    try:
        advices = advise_instance(arguments.instance, directory, goal)
    except (NoInstanceError, LedgerDirectoryError) as error:
        return _refuse(arguments, str(error))
    refusals = [f"no advice for replica {advice.replica}: {advice.refused}" for advice in advices if advice.refused]
    if refusals:
        return _refuse(arguments, "; ".join(refusals))
    chosen = max(advices, key=lambda advice: advice.advised_limit_tokens or 0)
    arguments.limit = chosen.advised_limit_tokens
    own = f"; {arguments.note}" if arguments.note else ""
    text = f"of-max {arguments.of_max:g} of {chosen.attainable:.3f}{own}"
    arguments.note = text.encode()[:MAX_NOTE_BYTES].decode(errors="ignore")
    if not arguments.json:
        print(f"advised: {limit_phrase(chosen)} for {chosen.wanted:.3f}, {goal.describe()}")
        for warning in chosen.warnings:
            complain(warning)
    return None


def _refuse(arguments: argparse.Namespace, reason: str) -> int:
    if arguments.json:
        nothing = PublicationResult(PublicationStatus.UNAVAILABLE, arguments.instance, 0, 0, warnings=(reason,))
        print(json.dumps({**nothing.to_dict(), "limit_tokens": None}))
    complain(f"unavailable: {reason}; nothing was published")
    return exit_codes.UNAVAILABLE
