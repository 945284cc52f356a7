"""What a supervisor remembers of its instances from one look to the next, and the parties that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcached.balance.rules import ABSENT_S, FLOOR_OF_EQUAL, Rules
from kvcached.balance.standing import Party, Standing
from kvcached.balance.traffic import Reading, TrafficMeter
from kvcached.balance.worth import unusable_curve, worth_of, young_curve
from kvcached.instance_patterns import is_pattern
from kvcached.ledger.waiting import ABSENCE_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcached.balance.engine_look import InstanceLook
    from kvcached.balance.terms import Terms
    from kvcached.values import Outcome

MOST_FAILED_SHRINKS = 3
"""After how many shrinks in a row that did not come about an instance is left alone until its outcome changes."""


@dataclass
class _Known:
    """One instance: its last look and what was learnt of this incarnation of it."""

    look: InstanceLook
    meter: TrafficMeter
    seen_s: float
    is_ours: bool
    failed_shrinks: int = 0
    failed_outcome: Outcome | None = None


class Observations:
    """All instances of a budget over time. For one thread; times are monotonic seconds, given by the caller."""

    def __init__(self, terms: Terms, rules: Rules, published: Mapping[str, tuple[str, int]] | None = None) -> None:
        """Begin; ``published`` has the incarnation and revision that a predecessor published to each instance."""
        self._terms = terms
        self._rules = rules
        self._known: dict[str, _Known] = {}
        self._published = dict(published or {})
        self._last_look_s = float("-inf")

    @property
    def published(self) -> Mapping[str, tuple[str, int]]:
        """The incarnation and revision of the newest own publication to each instance."""
        return self._published

    def knows(self, name: str, incarnation: str, revision: int) -> bool:
        """Return whether a publication is one's own."""
        return self._published.get(name) == (incarnation, revision)

    def note_published(self, name: str, incarnation: str, revision: int) -> None:
        """Remember an own publication."""
        self._published[name] = (incarnation, revision)

    def note_shrink(self, name: str, outcome: Outcome | None) -> None:
        """Remember that a shrink came about (None), or did not and what the engine said."""
        known = self._known.get(name)
        if known is not None:
            known.failed_shrinks = known.failed_shrinks + 1 if outcome is not None else 0
            known.failed_outcome = outcome

    def note(self, looks: Mapping[str, InstanceLook], now_s: float) -> bool:
        """Take a look in. Returns whether an instance came, ended or was restarted since the last one."""
        present = {name for name, known in self._known.items() if known.seen_s == self._last_look_s}
        changed = present != set(looks)
        for name, look in looks.items():
            known = self._known.get(name)
            if known is None or known.look.incarnation != look.incarnation:
                changed = True
                fresh = _Known(look, TrafficMeter(self._rules), now_s, is_ours=False)
                fresh.is_ours = self._is_ours(look, known)
                self._known[name] = known = fresh
            else:
                known.is_ours = self._is_ours(look, known)
                known.look, known.seen_s = look, now_s
            known.meter.note(_reading(look, now_s))
        self._last_look_s = now_s
        gone = [name for name, known in self._known.items() if now_s - known.seen_s > ABSENT_S]
        for name in gone:
            del self._known[name]
        return changed

    def _is_ours(self, look: InstanceLook, known: _Known | None) -> bool:
        """Return whether nobody else published what an instance is told now."""
        if look.revision == 0 or self.knows(look.name, look.incarnation, look.revision):
            return True
        if look.published_by is not None:
            return look.published_by.note.startswith(self._terms.mark)
        # An engine that lost its ledger registers again with its limit and a higher revision, which has no record.
        return known is not None and known.is_ours and known.look.limit_tokens == look.limit_tokens

    def parties(self, now_s: float) -> list[Party]:
        """Return how each instance stands now, in the order of their names."""
        count = max(1, len(self._known) + len(self._never_seen()))
        equal = self._terms.budget.size / count
        rates = {name: known.meter.tokens_per_s for name, known in self._known.items()}
        mean = sum(rates.values()) / count
        found = [self._party(known, equal, mean, now_s) for known in self._known.values()]
        reserve = round(equal * FLOOR_OF_EQUAL)
        found += [Party(name, Standing.ABSENT, "not seen yet", reserve) for name in self._never_seen()]
        return sorted(found, key=lambda party: party.name)

    def _never_seen(self) -> list[str]:
        named = [pattern for pattern in self._terms.patterns if not is_pattern(pattern)]
        return [name for name in named if name not in self._known]

    def _party(self, known: _Known, equal: float, mean: float, now_s: float) -> Party:
        look, budget = known.look, self._terms.budget
        cost = max(1, budget.token_cost(look))
        traffic = known.meter.tokens_per_s
        floor = self._terms.floors.get(look.name, int(equal * FLOOR_OF_EQUAL / cost))
        party = Party(
            look.name,
            Standing.BALANCED,
            "",
            budget.held(look),
            limit_tokens=look.limit_tokens,
            floor_tokens=-(-floor // look.block_tokens) * look.block_tokens,
            needed_tokens=look.needed_tokens,
            block_tokens=look.block_tokens,
            token_cost=cost,
            traffic=traffic,
            silent_s=known.meter.silent_s(now_s),
            known_s=known.meter.known_s(now_s),
            weight=self._terms.weights.get(look.name, 1.0),
            revision=look.revision,
            incarnation=look.incarnation,
        )
        if known.seen_s != self._last_look_s:
            return self._absent(party, known, equal, now_s)
        reason = self._reason_to_leave(known)
        if reason:
            return replace(party, standing=Standing.HELD if known.is_ours else Standing.BY_HAND, reason=reason)
        young = young_curve(look, equal / cost, busy=traffic >= mean > 0)
        if young:
            return replace(party, standing=Standing.HELD, reason=young, yields=True)
        return replace(party, worth=worth_of(look))

    def _absent(self, party: Party, known: _Known, equal: float, now_s: float) -> Party:
        """Reserve what an engine will hold that starts again; at first what it held: it may only be out of sight."""
        held, look = party.held, known.look
        if now_s - known.seen_s > ABSENCE_S:
            startup = max(replica.effective(replica.startup_tokens) for replica in look.replicas)
            held = min(startup * party.token_cost, round(equal), held)
        return replace(party, standing=Standing.ABSENT, reason="not running; its share stays reserved", held=held)

    def _reason_to_leave(self, known: _Known) -> str:
        """Return why an instance is not touched at all, or an empty text."""
        look = known.look
        if not known.is_ours:
            return _by_whom(look)
        if look.problem:
            return look.problem
        if known.failed_shrinks >= MOST_FAILED_SHRINKS and look.outcome is known.failed_outcome:
            return f"did not give anything back {known.failed_shrinks} times: {look.outcome.value}"
        return unusable_curve(look)


def _by_whom(look: InstanceLook) -> str:
    by = look.published_by
    if by is None:
        return f"r{look.revision} was published by somebody else"
    note = f", {by.note!r}" if by.note else ""
    return f"r{look.revision} was published by {by.program} of uid {by.uid}{note}"


def _reading(look: InstanceLook, now_s: float) -> Reading:
    pages = [replica.page for replica in look.replicas if replica.page is not None]
    return Reading(now_s, sum(page.requests for page in pages), sum(page.observed_tokens for page in pages))
