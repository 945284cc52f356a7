"""The best division of a budget: limits in tokens, before it is asked whether moving to them pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.balance.division import divide
from kvcached.balance.standing import Party, Standing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcached.balance.rules import Rules


def propose(parties: Sequence[Party], budget: int, rules: Rules) -> dict[str, int]:
    """Return each movable instance's limit in tokens under the best division of ``budget``.

    Whoever cannot be moved keeps what it holds. Who is held only until its curve can be relied on keeps at most its
    equal share, less where it has less traffic than others, and never gets more than it has. All others get their
    floors and the best of what is left.
    """
    limits = {party.name: _young_limit(party, parties, budget, rules) for party in parties if party.yields}
    costs = {party.name: limits[party.name] * party.token_cost for party in parties if party.yields}
    balanced = [party for party in parties if party.standing is Standing.BALANCED]
    fixed = sum(costs.get(party.name, party.held) for party in parties if party.standing is not Standing.BALANCED)
    rest = budget - fixed - sum(party.least_tokens * party.token_cost for party in balanced)
    if rest <= 0:  # somebody set more by hand, or requests need more: all give what they can
        return limits | {party.name: min(party.limit_tokens, _least(party)) for party in balanced}
    shares = _shares(balanced, rest, rules.units)
    return limits | {
        party.name: party.whole_blocks(party.least_tokens + shares[party.name] / party.token_cost) for party in balanced
    }


def _least(party: Party) -> int:
    return party.whole_blocks(party.least_tokens)


def _young_limit(party: Party, parties: Sequence[Party], budget: int, rules: Rules) -> int:
    """Return what an instance keeps whose curve cannot be relied on yet."""
    equal = budget / len(parties) / party.token_cost
    mean = sum(one.traffic for one in parties) / len(parties)
    if party.known_s >= rules.silent_s and mean > 0:
        equal *= min(1.0, party.traffic / mean)
    return min(party.limit_tokens, max(party.whole_blocks(equal), _least(party)))


def _shares(balanced: Sequence[Party], rest: float, units: int) -> dict[str, float]:
    """Return what each gets of ``rest``, in the budget's unit, above its floor."""
    unit = rest / units
    found = divide([[_saved(party, unit * count) for count in range(units + 1)] for party in balanced])
    shares = {party.name: unit * count for party, count in zip(balanced, found, strict=True)}
    _leave(shares, balanced, unit * (units - sum(found)))
    return shares


def _saved(party: Party, share: float) -> float:
    return party.saved_at(party.least_tokens + share / party.token_cost)


def _leave(shares: dict[str, float], balanced: Sequence[Party], left: float) -> None:
    """Leave what nobody gains from with those who have it: taking it would cost an eviction and bring nothing."""
    present = {party.name: (party.limit_tokens - party.least_tokens) * party.token_cost for party in balanced}
    missing: Mapping[str, float] = {name: max(0.0, present[name] - share) for name, share in shares.items()}
    total = sum(missing.values())
    if total > 0:
        for name, amount in missing.items():
            shares[name] += amount * min(1.0, left / total)
