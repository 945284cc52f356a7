"""A decision as JSON: what ``--json`` prints, and what the state file holds."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcached.balance.decision import Decision
    from kvcached.balance.publishing_round import RoundReport
    from kvcached.balance.standing import Party
    from kvcached.balance.terms import Terms


def decision_fields(decision: Decision, terms: Terms, report: RoundReport | None) -> dict[str, Any]:
    """Return a decision; ``report`` says what became of it, None where nothing was published."""
    limits = report.limits if report is not None else {}
    return {
        "time": datetime.now(tz=timezone.utc).isoformat(),
        "name": terms.name,
        "decision": decision.verdict.value,
        "reason": decision.reason,
        "bound": terms.budget.bound.value,
        "budget": decision.budget,
        "unit": "bytes" if terms.budget.in_bytes else "tokens",
        "held": decision.held,
        "over_budget": decision.over_budget,
        "hit_rate_now": decision.total_rate(best=False),
        "hit_rate_then": decision.total_rate(best=True),
        "gain": decision.gain,
        "payback_s": decision.payback_s,
        "problems": list(report.problems) if report is not None else [],
        "instances": [_party(decision, party, limits.get(party.name)) for party in decision.parties],
    }


def _party(decision: Decision, party: Party, published: int | None) -> dict[str, Any]:
    proposed = decision.limit_of(party, best=True)
    return {
        "name": party.name,
        "state": party.standing.value,
        "reason": party.reason,
        "traffic_tokens_per_second": party.traffic,
        "budget_per_token": party.token_cost,
        "weight": party.weight,
        "floor_tokens": party.floor_tokens,
        "limit_tokens": party.limit_tokens,
        "held": party.held,
        "hit_rate_now": party.rate_at(party.limit_tokens),
        "hit_rate_then": party.rate_at(proposed),
        "proposed_limit_tokens": proposed,
        "published_limit_tokens": published,
    }
