"""The bounds of a node's own, outside which its agent publishes nothing, whatever a document says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.limits import format_limit
from kvcached.values import UNLIMITED, Bound

if TYPE_CHECKING:
    from kvcached.fleet.document import DesiredTokens


@dataclass(frozen=True)
class NodeBounds:
    """The least and the most tokens of a limit and of a cap; a most of -1 is no bound."""

    min_limit: int = 0
    max_limit: int = UNLIMITED
    min_cap: int = 0
    max_cap: int = UNLIMITED

    def refusal(self, tokens: DesiredTokens) -> str:
        """Return why these tokens are refused, or an empty text."""
        limit = _refusal("limit", tokens.of(Bound.LIMIT), self.min_limit, self.max_limit)
        return limit or _refusal("cap", tokens.of(Bound.CAP), self.min_cap, self.max_cap)


def _refusal(what: str, tokens: int | None, least: int, most: int) -> str:
    if tokens is None:
        return ""
    size, top = _size(tokens), _size(most)
    if _size(least) <= size <= top:
        return ""
    option, edge = (f"--min-{what}", least) if size < _size(least) else (f"--max-{what}", most)
    return f"the {what} of {format_limit(tokens)} is outside this node's {option} {format_limit(edge)}"


def _size(tokens: int) -> float:
    return float("inf") if tokens == UNLIMITED else tokens
