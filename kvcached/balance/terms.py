"""What an operator asks of a balance: of whom, how much, and for whom more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached.balance.rules import DEFAULT_PERIOD_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcached.balance.budget import Budget

DEFAULT_NAME = "default"


def mark_of(name: str) -> str:
    """Return how the notes of the publications of the budget ``name`` begin."""
    return f"balance {name}: "


@dataclass(frozen=True)
class Terms:
    """The options of one supervisor. ``patterns`` are names or patterns of instances, ``floors`` are in tokens.

    ``name`` tells supervisors of one ledger directory apart; ``weights`` multiply what a saved prompt token counts.
    """

    ledger_dir: str
    patterns: tuple[str, ...]
    budget: Budget
    name: str = DEFAULT_NAME
    period_s: float = DEFAULT_PERIOD_S
    floors: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """How the notes of this supervisor's publications begin, by which its successor knows them."""
        return mark_of(self.name)
