"""Decisions: within the budget, above the floors, and nothing is moved that is not worth it."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.parties import cliff, party, saturating, useless

from kvcached.balance.decision import Decision, Verdict, decide
from kvcached.balance.rules import Rules
from kvcached.balance.standing import Party, Standing

RULES = Rules()
BUDGET = 60_000


@st.composite
def parties(draw: st.DrawFn) -> list[Party]:
    """Draw up to five instances of all kinds, of which some hold far more than their part."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        worth = draw(
            st.sampled_from([None, useless(), cliff(0.9, 20_000), saturating(0.8, 5_000), saturating(0.6, 30_000)])
        )
        limit = draw(st.integers(0, 80_000))
        held = limit + draw(st.sampled_from([0, 0, 3_000]))
        traffic, silent_s = draw(st.sampled_from([(0.0, 900.0), (50.0, 5.0), (20_000.0, 0.0)]))
        found.append(
            party(
                f"engine-{number}",
                limit,
                worth,
                held=held,
                traffic=traffic,
                silent_s=silent_s,
                yields=worth is None and draw(st.booleans()),
                floor_tokens=draw(st.sampled_from([0, 1_600])),
            )
        )
    return found


def sum_after(decision: Decision) -> int:
    """Return what is held of the budget once all limits that a decision proposes are applied."""
    return sum(
        decision.proposed.get(party.name, party.held) * (party.token_cost if party.name in decision.proposed else 1)
        for party in decision.parties
    )


@settings(deadline=None, max_examples=80, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(parties())
def test_no_division_is_above_the_budget_or_below_a_floor(found: list[Party]) -> None:
    """Limits under the best division fit beside what cannot be moved, and floors are kept, unless nothing is left."""
    decision = decide(found, BUDGET, RULES)
    fixed = sum(one.held for one in found if one.standing is not Standing.BALANCED and not one.yields)
    least = sum(one.floor_tokens for one in found if one.standing is Standing.BALANCED or one.yields)
    if decision.verdict is Verdict.REFUSED or fixed + least > BUDGET:
        return
    assert sum_after(decision) <= BUDGET
    for one in found:
        if one.standing is Standing.BALANCED and decision.moved():
            assert decision.limit_of(one, best=True) >= one.floor_tokens
        if one.yields:
            assert decision.limit_of(one, best=True) <= one.limit_tokens


@settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(parties())
def test_what_is_moved_without_need_gains(found: list[Party]) -> None:
    """Where the budget is not exceeded, a move saves at least half a percent of all prompt tokens, and pays back."""
    decision = decide(found, BUDGET, RULES)
    if decision.verdict is Verdict.MOVED and not decision.forced:
        assert decision.gain >= RULES.least_gain
        assert decision.payback_s <= RULES.payback_s
        before, after = decision.total_rate(best=False), decision.total_rate(best=True)
        assert before is not None
        assert after is not None
        assert after > before


def test_traffic_takes_from_silence() -> None:
    """Of two equal caches the one with all the traffic gets nearly all, and the other keeps its floor."""
    busy, idle = (
        party("busy", 30_000, saturating(0.8, 20_000)),
        party("idle", 30_000, saturating(0.8, 20_000), traffic=0.0),
    )
    decision = decide([busy, idle], BUDGET, RULES)
    assert decision.verdict is Verdict.MOVED
    assert decision.limit_of(busy, best=True) > 55_000
    assert 160 <= decision.limit_of(idle, best=True) < 1_000


def test_equal_engines_are_left_alone() -> None:
    """Where every cache is worth the same nothing is moved, and the reason is said."""
    decision = decide([party(name, 15_000, saturating(0.8, 5_000)) for name in "abcd"], BUDGET, RULES)
    assert decision.verdict is Verdict.STAYS
    assert "best" in decision.reason


def test_a_working_set_that_fits_is_worth_the_move() -> None:
    """Of two loops with room for one, one gets all of its working set and the other gives it up."""
    loops = [party(name, 30_000, cliff(0.95, 45_000)) for name in ("one", "other")]
    decision = decide(loops, BUDGET, RULES)
    assert decision.verdict is Verdict.MOVED
    assert max(decision.limit_of(loop, best=True) for loop in loops) >= 45_000


def test_two_equal_loops_are_not_swapped() -> None:
    """A loop that fits is not thrown away for one with a little more traffic: what it holds would be lost for long."""
    held, other = (
        party("held", 50_000, cliff(0.95, 45_000)),
        party("other", 10_000, cliff(0.95, 45_000), traffic=1_050.0),
    )
    decision = decide([held, other], BUDGET, RULES)
    assert decision.gain > RULES.least_gain
    assert decision.verdict is Verdict.STAYS
    assert "pay back" in decision.reason


def test_who_was_silent_gets_nothing_more() -> None:
    """Nothing is moved to an instance whose last request was minutes ago: it could not fill it."""
    fading = party("fading", 20_000, saturating(0.9, 30_000), silent_s=61.0)
    gone = party("gone", 40_000, saturating(0.9, 30_000), traffic=1.0, silent_s=500.0)
    decision = decide([fading, gone], BUDGET, RULES)
    assert decision.verdict is Verdict.STAYS
    assert "fading would get more" in decision.reason


def test_what_was_set_by_hand_is_off_the_budget() -> None:
    """An instance that somebody set keeps it, and the others share the rest."""
    pinned = Party("pinned", Standing.BY_HAND, "somebody", held=40_000, limit_tokens=40_000)
    others = [party("a", 10_000, saturating(0.8, 9_000), traffic=5_000.0), party("b", 10_000, saturating(0.8, 9_000))]
    decision = decide([pinned, *others], BUDGET, RULES)
    assert decision.limit_of(pinned, best=True) == 40_000
    assert sum(decision.limit_of(one, best=True) for one in others) <= 20_000


def test_a_hand_above_the_budget_presses_the_others_to_their_floors() -> None:
    """Where a hand holds more than the budget, the others give all but their floors, and the excess is said."""
    pinned = Party("pinned", Standing.BY_HAND, "somebody", held=70_000, limit_tokens=70_000)
    other = party("other", 10_000, saturating(0.8, 9_000))
    decision = decide([pinned, other], BUDGET, RULES)
    assert (decision.verdict, decision.over_budget) == (Verdict.MOVED, 20_000)
    assert decision.limit_of(other, best=True) == other.floor_tokens
    again = decide([pinned, party("other", 160, saturating(0.8, 9_000))], BUDGET, RULES)
    assert again.verdict is Verdict.STAYS
    assert "over the budget by 10,160" in again.reason


def test_unlimited_engines_are_brought_within_the_budget() -> None:
    """Engines without limits, of which nothing is known yet, are brought to equal shares at once."""
    unknown = [party(name, 200_000, None, yields=True, known_s=0.0, traffic=0.0) for name in ("one", "other")]
    decision = decide(unknown, BUDGET, RULES)
    assert decision.verdict is Verdict.MOVED
    assert {decision.limit_of(one, best=True) for one in unknown} == {30_000}


def test_weights_and_bytes_decide() -> None:
    """Of two equal curves the one whose tokens count ten times gets more, and so does the one with smaller tokens."""
    plain = party("plain", 10_000, saturating(0.8, 20_000))
    heavy = party("heavy", 10_000, saturating(0.8, 20_000), weight=10.0)
    weighed = decide([plain, heavy], BUDGET, RULES)
    assert weighed.limit_of(heavy, best=True) > 2 * weighed.limit_of(plain, best=True)
    large = party("large", 10_000, saturating(0.8, 20_000), token_cost=4, held=40_000)
    sized = decide([plain, large], BUDGET, RULES)
    assert sized.limit_of(plain, best=True) > sized.limit_of(large, best=True)


def test_floors_above_the_budget_are_refused_with_what_to_do() -> None:
    """Floors that do not fit are named, with the way out."""
    decision = decide([party(name, 100, useless(), floor_tokens=40_000) for name in "ab"], BUDGET, RULES)
    assert decision.verdict is Verdict.REFUSED
    assert "--floor" in decision.reason
