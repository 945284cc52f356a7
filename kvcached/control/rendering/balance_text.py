"""A decision of ``balance`` for people: one line while it runs, a table with who pays for one look."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvcached.balance.decision import Decision, Verdict
from kvcached.control.rendering.table import Cell, Table
from kvcached.control.rendering.text import BAD, BUSY, GOOD, STRONG, count, size, wants_colour, width_of

if TYPE_CHECKING:
    from kvcached.balance.standing import Party
    from kvcached.balance.terms import Terms

_HEAD = ("instance", "state", "traffic/s", "limit", "then", "rate", "then", "saves/s")
_UNKNOWN = "-"

COUNTED_ALIKE = "a prompt token saved counts the same in every model; --weight NAME=W says otherwise"


def situation(decision: Decision) -> object:
    """Return what makes a decision that moves nothing worth a new line: its kind, and who is balanced and who not."""
    return decision.verdict, tuple((party.name, party.standing, party.yields) for party in decision.parties)


def decision_line(decision: Decision, terms: Terms) -> str:
    """Return a decision in one line."""
    left = [
        f"{party.name} {party.standing} at {count(party.limit_tokens)}: {party.reason}"
        for party in decision.parties
        if party.reason
    ]
    if decision.verdict is not Verdict.MOVED:
        return "; ".join(
            [f"{decision.verdict}: {decision.reason}", *(left if decision.verdict is Verdict.STAYS else ())]
        )
    parts = [_moved_text(decision, terms)]
    changes = [_change_text(decision, party) for party in decision.moved() if party.worth is not None]
    parts += [", ".join(changes)] if changes else []
    now, then = decision.total_rate(best=False), decision.total_rate(best=True)
    if now is not None and then is not None:
        parts.append(f"all {now:.3f} -> {then:.3f}")
    if decision.payback_s >= 1:
        parts.append(f"pays back in {decision.payback_s:.0f} s")
    return "; ".join([*parts, *([decision.reason] if decision.reason else []), *left])


def _moved_text(decision: Decision, terms: Terms) -> str:
    """Return how much goes from whom to whom."""
    givers = [party for party in decision.moved() if decision.limit_of(party, best=True) < party.limit_tokens]
    takers = [party for party in decision.moved() if decision.limit_of(party, best=True) > party.limit_tokens]
    changed = givers or takers
    amount = sum(abs(decision.limit_of(party, best=True) - party.limit_tokens) * party.token_cost for party in changed)
    source = f" from {', '.join(party.name for party in givers)}" if givers else ""
    target = f" to {', '.join(party.name for party in takers)}" if takers else ""
    return f"moved {budget_text(amount, terms)}{source}{target}"


def _change_text(decision: Decision, party: Party) -> str:
    now, then = party.rate_at(party.limit_tokens), party.rate_at(decision.limit_of(party, best=True))
    points = ((then or 0.0) - (now or 0.0)) * 100
    return f"{party.name} ({count(round(party.traffic))} tok/s) {points:+.1f} points"


def budget_text(amount: int, terms: Terms) -> str:
    """Return an amount in the budget's own unit."""
    return size(amount) if terms.budget.in_bytes else f"{count(amount)} tokens"


def decision_table(decision: Decision, terms: Terms, *, dry: bool) -> list[str]:
    """Return a decision as a table: what everybody has and would have, what it saves, and who pays."""
    colour = wants_colour(sys.stdout)
    table = Table(frozenset({0, 1}))
    table.add(*(Cell(text, STRONG) for text in _HEAD))
    for party in decision.parties:
        table.add(*_cells(decision, party))
        if party.reason:
            table.remark(party.reason, BUSY)
    held = f"{budget_text(decision.held, terms)} of {budget_text(decision.budget, terms)} held"
    now, then = decision.total_rate(best=False), decision.total_rate(best=True)
    rates = f"; all {now:.3f} -> {then:.3f}" if now is not None and then is not None else ""
    tense = "would be " if dry and decision.verdict is Verdict.MOVED else ""
    why = f": {decision.reason}" if decision.reason else ""
    lines = [*table.lines(width_of(sys.stdout), colour=colour), f"{held}{rates}; {tense}{decision.verdict}{why}"]
    return lines if terms.weights else [*lines, COUNTED_ALIKE]


def _cells(decision: Decision, party: Party) -> list[Cell]:
    then_tokens = decision.limit_of(party, best=True)
    now, then = party.rate_at(party.limit_tokens), party.rate_at(then_tokens)
    saved = party.saved_at(then_tokens) - party.saved_at(party.limit_tokens)
    return [
        Cell(party.name, STRONG),
        Cell(party.standing.value, "" if party.worth is not None else BUSY),
        Cell(count(round(party.traffic))),
        Cell(count(party.limit_tokens)),
        Cell(count(then_tokens)),
        Cell(_UNKNOWN if now is None else f"{now:.3f}"),
        Cell(_UNKNOWN if then is None else f"{then:.3f}"),
        Cell(
            f"{round(saved):+,}" if round(saved) else "0", BAD if round(saved) < 0 else GOOD if round(saved) > 0 else ""
        ),
    ]
