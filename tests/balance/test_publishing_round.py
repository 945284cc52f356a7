"""Carrying a decision out on real ledgers: nothing is raised before it is given back, and who published last wins."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
from support.parties import saturating

from kvcached.balance.budget import Budget
from kvcached.balance.decision import Decision, Verdict
from kvcached.balance.looking import look_at_engines
from kvcached.balance.observations import Observations
from kvcached.balance.publishing_round import PublishingRound
from kvcached.balance.rules import Rules
from kvcached.balance.standing import Party, Standing
from kvcached.balance.terms import Terms
from kvcached.ledger.publication import publish
from kvcached.ledger.snapshot import take_snapshot
from kvcached.ledger.waiting import wait_until_applied
from kvcached.values import Bound, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from support.commands import Toys

    from kvcached.balance.engine_look import InstanceLook

BUDGET = 40_000


class Round:
    """One round between "a", which gives, and "b", which gets, under a budget of 40,000 tokens."""

    def __init__(
        self, ledger_dir: Path, monkeypatch: pytest.MonkeyPatch, size: int = BUDGET, budget: Budget | None = None
    ) -> None:
        monkeypatch.setattr("kvcached.balance.publishing_round.SHRINK_WAIT_S", 0.5)
        self.terms = Terms(str(ledger_dir), ("a", "b"), budget or Budget(size, in_bytes=False))
        self.observations = Observations(self.terms, Rules())
        self.before = self.look()

    def look(self) -> Mapping[str, InstanceLook]:
        found = look_at_engines(
            self.terms.ledger_dir, self.terms.patterns, self.terms.budget.bound, self.observations.knows
        )
        self.observations.note(found.instances, time.monotonic())
        return found.instances

    def prepare(self, **wanted: int) -> PublishingRound:
        """Return a round that brings "a" and "b" to these limits."""
        parties = tuple(
            Party(
                name,
                Standing.BALANCED,
                "",
                self.terms.budget.held(look),
                look.limit_tokens,
                block_tokens=16,
                token_cost=self.terms.budget.token_cost(look),
                traffic=100.0,
                worth=saturating(0.8, 5_000),
                revision=look.revision,
                incarnation=look.incarnation,
            )
            for name, look in self.before.items()
        )
        decision = Decision(Verdict.MOVED, "", BUDGET, 0, parties, wanted)
        return PublishingRound(decision, self.terms, self.observations, self.look)

    def limits(self) -> dict[str, int]:
        """Return what is published to each."""
        return {name: look.limit_tokens for name, look in self.look().items()}


def test_what_is_given_back_is_given_away(ledger_dir: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a round both engines have what was decided, each told so by a note with the budget's name."""
    toys.start("a", "b", startup_limit=20_000, idle=20_000)
    round_ = Round(ledger_dir, monkeypatch)
    report = round_.prepare(a=8_000, b=32_000).run()
    assert (dict(report.limits), report.problems) == ({"a": 8_000, "b": 32_000}, ())
    assert round_.limits() == {"a": 8_000, "b": 32_000}
    others = Observations(round_.terms, Rules())
    found = look_at_engines(str(ledger_dir), ("a", "b"), Bound.LIMIT, others.knows).instances["a"].published_by
    assert found is not None
    assert found.note.startswith("balance default: ")


@pytest.mark.parametrize("trouble", ["deaf", "locked", "eviction"])
def test_nothing_is_raised_that_was_not_given_back(
    ledger_dir: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """While an engine does not take its new limit, or cannot evict, it still holds its share, and that is said."""
    toys.start("a", startup_limit=20_000, idle=20_000, trouble=trouble)
    toys.start("b", startup_limit=20_000)
    round_ = Round(ledger_dir, monkeypatch)
    report = round_.prepare(a=8_000, b=32_000).run()
    assert dict(report.limits) == {"a": 8_000}
    assert "a has not given its share back" in report.problems[0]
    assert round_.limits()["b"] == 20_000


def test_idle_tokens_count_also_where_the_limit_is_lower(
    ledger_dir: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine still has beyond its limit is not given away, whatever it says of that limit."""
    toys.start("a", startup_limit=8_000, idle=20_000, trouble="locked")
    toys.start("b", startup_limit=20_000)
    round_ = Round(ledger_dir, monkeypatch)
    assert dict(round_.prepare(b=32_000).run().limits) == {}
    assert round_.look()["a"].replicas[0].held_tokens == 20_000


def test_a_hand_meanwhile_ends_the_round(ledger_dir: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that somebody published after the look is not overwritten, and nothing else is done."""
    toys.start("a", "b", startup_limit=20_000)
    round_ = Round(ledger_dir, monkeypatch)
    prepared = round_.prepare(a=8_000, b=32_000)
    assert publish(4_000, "a", str(ledger_dir)).accepted
    report = prepared.run()
    assert dict(report.limits) == {}
    assert "superseded" in report.problems[0]
    assert round_.limits() == {"a": 4_000, "b": 20_000}


def test_a_hand_that_raises_leaves_less_to_give(ledger_dir: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody took between shrink and raise is not given away a second time."""
    toys.start("a", "b", startup_limit=20_000)
    toys.start("c", startup_limit=100, idle=0)
    round_ = Round(ledger_dir, monkeypatch, size=BUDGET + 100)
    round_.terms = Terms(round_.terms.ledger_dir, ("a", "b", "c"), round_.terms.budget)
    round_.before = {name: look for name, look in round_.look().items() if name != "c"}
    prepared = round_.prepare(a=8_000, b=32_000)
    assert publish(5_100, "c", str(ledger_dir)).accepted
    report = prepared.run()
    assert dict(report.limits) == {"a": 8_000, "b": 27_000 // 16 * 16}


def test_caps_are_given_away_when_their_memory_is_back(
    ledger_dir: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a budget of all KV in bytes, caps move as limits do, and limits stay what they are."""
    toys.start("a", "b", token_bytes=1024, cap_floor=1_000, capacity=40_000)
    for name, cap in (("a", 20_000), ("b", 20_000)):
        published = publish(cap, name, str(ledger_dir), bound=Bound.CAP)
        assert wait_until_applied(published, str(ledger_dir), 20.0).applied
    round_ = Round(ledger_dir, monkeypatch, budget=Budget(BUDGET * 1024, in_bytes=True, bound=Bound.CAP))
    report = round_.prepare(a=14_000, b=39_000).run()
    assert (dict(report.limits), report.problems) == ({"a": 14_000, "b": 26_000}, ())
    assert {
        member.slot.desired.revision for one in take_snapshot(str(ledger_dir)).replicas for member in one.members
    } == {0}


def test_a_cap_that_is_refused_gives_nothing(ledger_dir: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap below what one longest request needs is not applied, so nothing of it is given away."""
    toys.start("a", token_bytes=1024, cap_floor=16_000, capacity=20_000)
    toys.start("b", token_bytes=1024, cap_floor=1_000, capacity=40_000)
    published = publish(20_000, "b", str(ledger_dir), bound=Bound.CAP)
    assert wait_until_applied(published, str(ledger_dir), 20.0).applied
    round_ = Round(ledger_dir, monkeypatch, budget=Budget(BUDGET * 1024, in_bytes=True, bound=Bound.CAP))
    report = round_.prepare(a=8_000, b=32_000).run()
    assert dict(report.limits) == {"a": 8_000}
    assert "16000 tokens" in report.problems[0]
    assert round_.look()["a"].problem.startswith("rejected_below_floor")


def test_shrinks_that_fail_are_counted_until_the_outcome_changes(
    ledger_dir: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three shrinks in a row that did not come about the instance is left alone; its outcome is the reason."""
    toys.start("a", startup_limit=20_000, idle=20_000, trouble="locked")
    toys.start("b", startup_limit=20_000)
    round_ = Round(ledger_dir, monkeypatch)
    for limit in (8_000, 7_200, 6_400):
        round_.prepare(a=limit).run()
        round_.before = round_.look()
    assert round_.before["a"].outcome is Outcome.HELD
    found = {party.name: party for party in round_.observations.parties(time.monotonic())}
    assert (found["a"].standing, "3 times: held" in found["a"].reason) == (Standing.HELD, True)


def test_no_look_is_above_the_budget_while_an_engine_is_slow(
    ledger_dir: Path, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the giving engine is stopped and goes on later, no moment has more than the budget published or held."""
    slow = toys.start("a", startup_limit=20_000, idle=20_000)
    toys.start("b", startup_limit=20_000)
    round_ = Round(ledger_dir, monkeypatch)
    monkeypatch.setattr("kvcached.balance.publishing_round.SHRINK_WAIT_S", 20.0)
    slow.send_signal(signal.SIGSTOP)
    thread = threading.Thread(target=round_.prepare(a=8_000, b=32_000).run)
    thread.start()
    sums = []
    begun = time.monotonic()
    while thread.is_alive():
        looks = look_at_engines(str(ledger_dir), ("a", "b"), Bound.LIMIT, lambda *_: True).instances
        sums.append(sum(replica.held_tokens for look in looks.values() for replica in look.replicas))
        if time.monotonic() > begun + 0.3:
            slow.send_signal(signal.SIGCONT)
        time.sleep(0.005)
    thread.join()
    print(f"{len(sums)} looks")
    assert len(sums) > 20
    assert max(sums) <= BUDGET
    assert round_.limits() == {"a": 8_000, "b": 32_000}
