"""LIMIT in percent or in bytes: turned into tokens by what each instance reports, before anything is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.control import exit_codes
from kvcached.control.rendering.text import complain
from kvcached.ledger.not_found import not_found_message
from kvcached.ledger.snapshot import take_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcached.ledger.snapshot import Snapshot
    from kvcached.limits import Amount


def take_amount(amount: Amount, names: Iterable[str], directory: str) -> dict[str, int] | int:
    """Return the tokens that ``amount`` is for each instance; an exit code, after saying why, where that is unknown.

    All replicas of an instance are told one number: the smallest of what it would be for each.
    """
    snapshot = take_snapshot(directory)
    limits = {}
    for name in names:
        if not snapshot.of(name).replicas:
            complain(f"unavailable: {not_found_message(snapshot, name)}; nothing was published")
            return exit_codes.UNAVAILABLE
        try:
            limits[name] = _tokens_of(amount, snapshot.of(name))
        except ValueError as error:
            complain(f"{name}: {error}; nothing was published")
            return exit_codes.USAGE
    return limits


def _tokens_of(amount: Amount, snapshot: Snapshot) -> int:
    reports = [replica.slot.report for replica in snapshot.replicas]
    return min(amount.tokens(report.capacity_tokens, report.token_bytes) for report in reports)
