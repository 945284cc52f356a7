"""What a supervisor remembers from look to look: whose a limit is, who restarted, and what is kept for the absent."""

from __future__ import annotations

from dataclasses import replace

from support.engine_looks import instance_look

from kvcached.balance.budget import Budget
from kvcached.balance.engine_look import PublishedBy
from kvcached.balance.observations import Observations
from kvcached.balance.rules import ABSENT_S, Rules
from kvcached.balance.standing import Party, Standing
from kvcached.balance.terms import Terms

BUDGET = 60_000
TERMS = Terms("", ("a", "b"), Budget(BUDGET, in_bytes=False), floors={"b": 1_600}, weights={"a": 3.0})
OURS = PublishedBy("balance default: to a, all +1.0 points", 1000, "kvcached-control")
THEIRS = PublishedBy("night shift", 1000, "kvcached-control")


def party(observations: Observations, name: str, now_s: float) -> Party:
    (found,) = (one for one in observations.parties(now_s) if one.name == name)
    return found


def test_a_seen_instance_is_balanced_with_its_weight_and_floor() -> None:
    """An instance with a curve is balanced; weight and floor are the given ones, or 1 and a tenth of an equal share."""
    observations = Observations(TERMS, Rules())
    observations.note({"a": instance_look("a"), "b": instance_look("b")}, 10.0)
    a, b = party(observations, "a", 10.0), party(observations, "b", 10.0)
    assert (a.standing, a.weight, a.floor_tokens) == (Standing.BALANCED, 3.0, 3_008)
    assert (b.standing, b.weight, b.floor_tokens) == (Standing.BALANCED, 1.0, 1_600)


def test_another_hand_pins_and_giving_back_unpins() -> None:
    """A publication with anybody else's note pins, one with the budget's own note, as of ``--take``, does not."""
    observations = Observations(TERMS, Rules())
    observations.note({"a": instance_look("a", revision=2, published_by=THEIRS)}, 1.0)
    pinned = party(observations, "a", 1.0)
    assert (pinned.standing, "'night shift'" in pinned.reason) == (Standing.BY_HAND, True)
    observations.note({"a": instance_look("a", revision=3, published_by=OURS)}, 2.0)
    assert party(observations, "a", 2.0).standing is Standing.BALANCED


def test_what_no_record_explains_is_somebody_elses() -> None:
    """A revision that is not one's own and that no record holds pins; what a predecessor's state names does not."""
    look = instance_look("a", revision=7, published_by=None)
    stranger = Observations(TERMS, Rules())
    stranger.note({"a": look}, 1.0)
    assert party(stranger, "a", 1.0).standing is Standing.BY_HAND
    successor = Observations(TERMS, Rules(), {"a": (look.incarnation, 7)})
    successor.note({"a": look}, 1.0)
    assert party(successor, "a", 1.0).standing is Standing.BALANCED


def test_an_engine_that_lost_its_ledger_stays_ours() -> None:
    """One that registers again with the same limit under a higher revision, without a record, is not pinned."""
    observations = Observations(TERMS, Rules())
    observations.note({"a": instance_look("a", revision=3, published_by=OURS)}, 1.0)
    again = instance_look("a", revision=4, incarnation="again", published_by=None)
    observations.note({"a": again}, 3.0)
    assert party(observations, "a", 3.0).standing is Standing.BALANCED
    other = instance_look("a", revision=5, incarnation="again", limit=999, published_by=None)
    observations.note({"a": other}, 4.0)
    assert party(observations, "a", 4.0).standing is Standing.BY_HAND


def test_the_absent_keep_a_reserve_for_ten_minutes() -> None:
    """At first all that it held is reserved, then what it starts with again, and after ten minutes nothing."""
    observations = Observations(replace(TERMS, patterns=("*",)), Rules())
    both = {"a": instance_look("a", limit=40_000, startup=8_000), "b": instance_look("b", limit=10_000)}
    observations.note(both, 0.0)
    assert observations.note({"b": both["b"]}, 1.0)
    assert (party(observations, "a", 1.0).standing, party(observations, "a", 1.0).held) == (Standing.ABSENT, 40_000)
    observations.note({"b": both["b"]}, 10.0)
    assert party(observations, "a", 10.0).held == 8_000
    observations.note({"b": both["b"]}, ABSENT_S + 1)
    assert [one.name for one in observations.parties(ABSENT_S + 1)] == ["b"]


def test_a_named_instance_that_was_never_seen_has_a_reserve() -> None:
    """A name that is not a pattern keeps a tenth of an equal share free until its engine comes."""
    observations = Observations(TERMS, Rules())
    observations.note({"a": instance_look("a")}, 1.0)
    missing = party(observations, "b", 1.0)
    assert (missing.standing, missing.held) == (Standing.ABSENT, 3_000)


def test_a_restart_forgets_the_traffic_and_asks_for_a_decision() -> None:
    """A new incarnation is a change, and its rate is not that of its predecessor."""
    observations = Observations(TERMS, Rules())
    for second in range(20):
        looks = {"a": instance_look("a", requests=second * 10), "b": instance_look("b")}
        assert observations.note(looks, float(second)) is (second == 0)
    assert party(observations, "a", 19.0).traffic > 0
    assert observations.note({"a": instance_look("a", incarnation="new"), "b": instance_look("b")}, 20.0)
    assert party(observations, "a", 20.0).traffic == 0


def test_a_young_curve_yields_and_an_unusable_one_is_left_alone() -> None:
    """Too few requests hold an instance that has to make room; an advisor that is off holds one that is not touched."""
    observations = Observations(TERMS, Rules())
    looks = {"a": instance_look("a", requests=61), "b": instance_look("b", page=False)}
    observations.note(looks, 1.0)
    young, off = party(observations, "a", 1.0), party(observations, "b", 1.0)
    assert (young.standing, young.yields, young.reason) == (Standing.HELD, True, "61 of 100 requests seen")
    assert (off.standing, off.yields, "no curve" in off.reason) == (Standing.HELD, False, True)


def test_caps_leave_room_for_running_requests() -> None:
    """Under a budget of caps an instance needs what its requests hold 95 % of the time, and never gets less."""
    terms = replace(TERMS, budget=Budget(BUDGET, in_bytes=False, bound=instance_look("a", cap=True).bound))
    observations = Observations(terms, Rules())
    observations.note({"a": instance_look("a", cap=True), "b": instance_look("b", cap=True)}, 1.0)
    a = party(observations, "a", 1.0)
    assert a.needed_tokens == 2_000
    assert a.least_tokens == a.floor_tokens + 2_000
    assert a.rate_at(2_000) == a.rate_at(0)
