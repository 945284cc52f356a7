"""The supervisor: look often, decide now and then, publish rarely."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvcached.balance.decision import Decision, Verdict, decide
from kvcached.balance.looking import look_at_engines
from kvcached.balance.publishing_round import PublishingRound, RoundReport
from kvcached.balance.rules import LOOKS_PER_PERIOD, rules_for

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from kvcached.balance.engine_look import InstanceLook
    from kvcached.balance.observations import Observations
    from kvcached.balance.terms import Terms

    Listener = Callable[[Decision, RoundReport | None], None]


class Supervisor:
    """Divides one budget, until told to stop. For one thread; ``stop`` may be set from any, or by a signal handler.

    With ``publishing`` off it decides and changes nothing.
    """

    def __init__(self, terms: Terms, observations: Observations, *, publishing: bool) -> None:
        self.observations = observations
        self._terms = terms
        self._rules = rules_for(terms.period_s)
        self._publishing = publishing
        self._problem = ""

    def look(self) -> Mapping[str, InstanceLook]:
        """Look at the engines now. Raises :class:`NativeLibraryError` alone."""
        terms = self._terms
        seen = look_at_engines(terms.ledger_dir, terms.patterns, terms.budget.bound, self.observations.knows)
        self._problem = seen.problem or terms.budget.unfit(list(seen.instances.values()))
        return seen.instances

    def run(self, stop: threading.Event, listener: Listener) -> None:
        """Look and decide until ``stop`` is set; a round that has begun is finished. Tells ``listener`` each decision.

        At the start, and whenever an instance came, ended or was restarted, it decides at once.
        """
        pause_s = self._terms.period_s / LOOKS_PER_PERIOD
        due_s = 0.0
        while not stop.is_set():
            begun_s = time.monotonic()
            changed = self.observations.note(self.look(), begun_s)
            if changed or begun_s >= due_s:
                due_s = begun_s + self._terms.period_s
                listener(*self.decide_and_publish())
            stop.wait(max(0.0, begun_s + pause_s - time.monotonic()))

    def run_once(self, stop: threading.Event) -> tuple[Decision, RoundReport | None] | None:
        """Watch the traffic for one period, then decide; None if no instance is there, or ``stop`` was set."""
        pause_s = self._terms.period_s / LOOKS_PER_PERIOD
        looks: Mapping[str, InstanceLook] = {}
        for _ in range(LOOKS_PER_PERIOD + 1):
            looks = self.look()
            self.observations.note(looks, time.monotonic())
            if not looks or stop.wait(pause_s):
                break
        return self.decide_and_publish() if looks and not stop.is_set() else None

    def decide_and_publish(self) -> tuple[Decision, RoundReport | None]:
        """Decide by what was noted so far, and carry it out; the report is None where nothing was to be published."""
        decision = self._decide()
        if decision.verdict is not Verdict.MOVED or not self._publishing:
            return decision, None
        return decision, PublishingRound(decision, self._terms, self.observations, self.look).run()

    def _decide(self) -> Decision:
        parties = self.observations.parties(time.monotonic())
        size = self._terms.budget.size
        if self._problem or not parties:
            reason = self._problem or "no instance is running"
            return Decision(Verdict.REFUSED, reason, size, sum(party.held for party in parties), tuple(parties))
        return decide(parties, size, self._rules)
