"""One decision: who gets which limit, and whether that is worth moving. Values in, values out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvcached.balance.proposal import propose
from kvcached.balance.standing import Party, Standing
from kvcached.values import TextEnum

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcached.balance.rules import Rules


class Verdict(TextEnum):
    """What a decision is."""

    MOVED = "moved"
    STAYS = "stays"
    REFUSED = "refused"


@dataclass(frozen=True)
class Decision:
    """What is decided, and why. ``proposed`` has each instance's limit in tokens under the best division.

    ``budget`` and ``held`` are in the budget's unit. ``gain`` is the part of all prompt tokens that the best division
    saves beyond the present one, ``payback_s`` after how many seconds it has regained what moving throws away.
    ``forced`` says that more than the budget is held, so that no gain is asked for.
    """

    verdict: Verdict
    reason: str
    budget: int
    held: int
    parties: tuple[Party, ...]
    proposed: Mapping[str, int] = field(default_factory=dict)
    gain: float = 0.0
    payback_s: float = 0.0
    forced: bool = False

    @property
    def over_budget(self) -> int:
        """By how much more than the budget is held, 0 if it is not."""
        return max(0, self.held - self.budget)

    def moved(self) -> list[Party]:
        """Return whose limit the best division changes."""
        return [
            party for party in self.parties if self.proposed.get(party.name, party.limit_tokens) != party.limit_tokens
        ]

    def total_rate(self, *, best: bool) -> float | None:
        """Return the predicted hit rate of all balanced instances together, now or under the best division."""
        known = [party for party in self.parties if party.worth is not None and party.traffic > 0]
        traffic = sum(party.weight * party.traffic for party in known)
        if traffic <= 0:
            return None
        return sum(party.saved_at(self.limit_of(party, best=best)) for party in known) / traffic

    def limit_of(self, party: Party, *, best: bool) -> int:
        """Return a party's limit in tokens, the present one or that of the best division."""
        return self.proposed.get(party.name, party.limit_tokens) if best else party.limit_tokens


def decide(parties: Sequence[Party], budget: int, rules: Rules) -> Decision:
    """Return what to do with ``parties``, which share ``budget``. Publishes nothing."""
    held = sum(party.held for party in parties)
    nothing = Decision(Verdict.REFUSED, "", budget, held, tuple(parties))
    problem = _refusal(parties, budget, over=held > budget)
    if problem:
        return _because(nothing, problem)
    proposed = propose(parties, budget, rules)
    best = Decision(Verdict.STAYS, "", budget, held, tuple(parties), proposed, forced=held > budget)
    if not best.moved():
        over = f"over the budget by {best.over_budget:,}, and nobody can give more" if best.forced else ""
        return _because(best, over or "the present division is the best one")
    best = _weighed(best)
    if best.forced:
        return _because(best, f"over the budget by {best.over_budget:,}", Verdict.MOVED)
    objection = _objection(best, rules)
    return _because(best, objection) if objection else _because(best, "", Verdict.MOVED)


def _refusal(parties: Sequence[Party], budget: int, *, over: bool) -> str:
    """Return why nothing can be decided at all."""
    if not any(party.standing is Standing.BALANCED or (over and party.yields) for party in parties):
        reasons = "; ".join(f"{party.name}: {party.reason or party.standing}" for party in parties)
        return f"no instance can be balanced ({reasons})"
    floors = sum(party.floor_tokens * party.token_cost for party in parties if party.standing is not Standing.ABSENT)
    if floors > budget:
        return f"the floors take {floors:,} and the budget is {budget:,}; lower a --floor or raise --budget"
    return ""


def _weighed(best: Decision) -> Decision:
    """Return the decision with its gain and the time after which it has paid."""
    traffic = sum(party.weight * party.traffic for party in best.parties)
    changes = [
        (party, party.saved_at(best.limit_of(party, best=True)) - party.saved_at(party.limit_tokens))
        for party in best.parties
    ]
    gain = sum(change for _, change in changes)
    lost = -sum(change for _, change in changes if change < 0)
    slowest = max([0.0, *(_fill_s(party, best.limit_of(party, best=True)) for party, _ in changes)])
    payback_s = lost * slowest / gain if gain > 0 and lost > 0 else 0.0
    return replace(best, gain=gain / traffic if traffic > 0 else 0.0, payback_s=payback_s)


def _fill_s(party: Party, limit_tokens: int) -> float:
    """Return how many seconds an instance takes to fill what it is given, at the rate of its misses."""
    raised = limit_tokens - party.limit_tokens
    missed = party.traffic * (1.0 - (party.rate_at(limit_tokens) or 0.0))
    return raised / missed if raised > 0 and missed > 0 else 0.0


def _objection(best: Decision, rules: Rules) -> str:
    """Return why the best division is not worth moving to, or an empty text."""
    if best.gain < rules.least_gain:
        return f"the best division is {best.gain:+.1%}, {rules.least_gain:.1%} is needed"
    if best.payback_s > rules.payback_s:
        return f"the best division is {best.gain:+.1%} and would pay back after {best.payback_s:.0f} s only"
    silent = [party.name for party in best.moved() if _is_silent_receiver(best, party, rules)]
    if silent:
        return f"{silent[0]} would get more, and was silent for the last {rules.silent_s:.0f} s"
    return ""


def _is_silent_receiver(best: Decision, party: Party, rules: Rules) -> bool:
    return best.limit_of(party, best=True) > party.limit_tokens and party.silent_s >= rules.silent_s


def _because(decision: Decision, reason: str, verdict: Verdict | None = None) -> Decision:
    return replace(decision, reason=reason, verdict=verdict or decision.verdict)
