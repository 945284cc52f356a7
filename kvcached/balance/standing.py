"""How each instance stands before a decision: what it has, what it would do with more, and whether it may be moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.values import TextEnum

if TYPE_CHECKING:
    from kvcached.balance.worth import Worth


class Standing(TextEnum):
    """What balancing does with an instance."""

    BALANCED = "balanced"
    HELD = "held"
    BY_HAND = "by hand"
    ABSENT = "absent"


@dataclass(frozen=True)
class Party:
    """One instance as a decision sees it. Sizes are tokens per replica, ``held`` is in the budget's own unit.

    ``reason`` says why it is not balanced. ``yields`` is said of one that is held only until its curve can be relied
    on: it has to make room for others. ``needed_tokens`` is what running requests need of a cap, ``token_cost`` what a
    token takes of the budget, ``traffic`` prompt tokens per second. ``worth`` is None unless it is balanced.
    """

    name: str
    standing: Standing
    reason: str
    held: int
    limit_tokens: int = 0
    floor_tokens: int = 0
    needed_tokens: int = 0
    block_tokens: int = 1
    token_cost: int = 1
    traffic: float = 0.0
    silent_s: float = 0.0
    known_s: float = 0.0
    weight: float = 1.0
    yields: bool = False
    worth: Worth | None = None
    revision: int = 0
    incarnation: str = ""

    @property
    def least_tokens(self) -> int:
        """The smallest limit it is given."""
        return self.floor_tokens + self.needed_tokens

    def rate_at(self, limit_tokens: float) -> float | None:
        """Return the hit rate at a limit (or cap), None where nothing is known."""
        return None if self.worth is None else self.worth.rate_at(max(0.0, limit_tokens - self.needed_tokens))

    def saved_at(self, limit_tokens: float) -> float:
        """Return the prompt tokens saved per second at a limit (or cap), times the weight."""
        rate = self.rate_at(limit_tokens)
        return 0.0 if rate is None else self.weight * self.traffic * rate

    def whole_blocks(self, tokens: float) -> int:
        """Return a limit rounded down to whole blocks."""
        return int(tokens + 1e-6) // self.block_tokens * self.block_tokens
