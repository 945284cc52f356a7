"""Carrying a decision out: shrink, wait until that is acknowledged, look again, raise what is free.

A supervisor that is killed between any two steps leaves the budget under-used and never exceeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvcached.arguments import MAX_NOTE_BYTES
from kvcached.balance.rules import SHRINK_WAIT_S
from kvcached.ledger.publication import publish
from kvcached.ledger.waiting import wait_until_applied

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcached.balance.decision import Decision
    from kvcached.balance.engine_look import InstanceLook
    from kvcached.balance.observations import Observations
    from kvcached.balance.standing import Party
    from kvcached.balance.terms import Terms
    from kvcached.ledger.results import PublicationResult


class Looker(Protocol):
    """Looks at the engines anew."""

    def __call__(self) -> Mapping[str, InstanceLook]:
        """Return the instances of the budget by name, as they are now."""


@dataclass(frozen=True)
class RoundReport:
    """What became of a decision: each instance's new limit in tokens, and sentences about what did not come about."""

    limits: Mapping[str, int]
    problems: tuple[str, ...] = ()


class PublishingRound:
    """One decision on its way to the engines. Used once, by the thread that decided."""

    def __init__(self, decision: Decision, terms: Terms, observations: Observations, looker: Looker) -> None:
        self._decision = decision
        self._terms = terms
        self._observations = observations
        self._looker = looker
        self._limits: dict[str, int] = {}
        self._problems: list[str] = []

    def run(self) -> RoundReport:
        """Do it; what the outside world does wrong is in the report."""
        changed = self._decision.moved()
        lowered = [party for party in changed if self._wanted(party) < party.limit_tokens]
        raised = [party for party in changed if self._wanted(party) > party.limit_tokens]
        if self._shrink(lowered):
            self._raise(sorted(raised, key=self._gain_of, reverse=True))
        return RoundReport(self._limits, tuple(self._problems))

    def _wanted(self, party: Party) -> int:
        return self._decision.limit_of(party, best=True)

    def _gain_of(self, party: Party) -> float:
        return party.saved_at(self._wanted(party)) - party.saved_at(party.limit_tokens)

    def _shrink(self, parties: Sequence[Party]) -> bool:
        """Publish what is lowered, and wait for all of it; False if somebody else published meanwhile."""
        results = []
        for party in parties:
            result = self._publish(party, self._wanted(party))
            if result is None:
                return False
            results.append(result)
        for party, result in zip(parties, results, strict=True):
            waited = wait_until_applied(result, self._terms.ledger_dir, SHRINK_WAIT_S)
            if not waited.applied:
                why = "; ".join([*waited.warnings, *(one.reason for one in waited.rejections)])
                self._problems.append(f"{party.name} has not given its share back: {why}")
            self._note_shrink(party, applied=bool(waited.applied))
        return True

    def _note_shrink(self, party: Party, *, applied: bool) -> None:
        look = None if applied else self._looker().get(party.name)
        self._observations.note_shrink(party.name, look.outcome if look is not None else None)

    def _raise(self, parties: Sequence[Party]) -> None:
        """Give what is free, and not what should be: who did not shrink still holds its share."""
        if not parties:
            return
        looks = self._looker()
        budget = self._terms.budget
        held = {name: budget.held(look) for name, look in looks.items()}
        # Who is out of sight for a moment still holds what it held.
        away = sum(party.held for party in self._decision.parties if party.name not in looks)
        free = budget.size - sum(held.values()) - away
        for party in parties:
            look = looks.get(party.name)
            if look is None or (look.incarnation, look.revision) != (party.incarnation, party.revision):
                self._problems.append(f"{party.name} was restarted or set by somebody else meanwhile")
                continue
            room = (held[party.name] + free) // party.token_cost
            tokens = party.whole_blocks(min(self._wanted(party), room))
            if tokens > party.limit_tokens and self._publish(party, tokens) is not None:
                free -= max(0, tokens * party.token_cost - held[party.name])

    def _publish(self, party: Party, tokens: int) -> PublicationResult | None:
        """Publish one limit if nobody else did since the look; None, with a sentence, otherwise."""
        result = publish(
            tokens,
            party.name,
            self._terms.ledger_dir,
            bound=self._terms.budget.bound,
            if_revision=party.revision,
            if_incarnation=party.incarnation,
            note=note_of(self._decision, self._terms.mark),
        )
        if not result.accepted:
            self._problems.append(f"{party.name}: {result.status}: {'; '.join(result.warnings)}")
            return None
        self._observations.note_published(party.name, result.incarnation or party.incarnation, result.revision)
        self._limits[party.name] = tokens
        return result


def note_of(decision: Decision, mark: str) -> str:
    """Return what the record of publications says of a move."""
    gaining = [party for party in decision.moved() if decision.limit_of(party, best=True) > party.limit_tokens]
    to = f"to {gaining[0].name}, " if gaining else ""
    why = "into the budget" if decision.forced else f"all {decision.gain * 100:+.1f} points"
    return f"{mark}{to}{why}".encode()[:MAX_NOTE_BYTES].decode(errors="ignore")
