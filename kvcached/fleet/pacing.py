"""When a bound of one target may be published again, after a failure or beside somebody else who publishes."""

from __future__ import annotations

from dataclasses import dataclass

FAILED_S = 0.1
CONTESTED_S = 1.0
LONGEST_S = 60.0
CALM_S = 120.0
"""After how many seconds without a contest the next one starts at ``CONTESTED_S`` again."""


@dataclass
class Pacing:
    """Of one bound of one incarnation: whether the fleet's tokens were in force, and until when to leave it alone.

    Times are ``time.monotonic()`` seconds.
    """

    key: tuple[str, int]
    in_place: bool = False
    contested: bool = False
    reason: str = ""
    _delay_s: float = 0.0
    _next: float = 0.0
    _last_contest: float = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether it may be published now."""
        return now >= self._next

    def settled(self, now: float) -> None:
        """Note that the tokens are in place."""
        self.in_place, self.contested, self.reason = True, False, ""
        if now - self._last_contest > CALM_S:
            self._delay_s = 0.0

    def differs(self, now: float) -> None:
        """Note that other tokens are in place; if these had been, somebody else published."""
        if self.in_place:
            self.in_place, self.contested, self._last_contest = False, True, now
            self._postpone(now, CONTESTED_S, "another limit was published on this node")

    def failed(self, now: float, reason: str) -> None:
        """Note that a publication failed."""
        self._postpone(now, FAILED_S, reason)

    def next_time(self) -> float:
        """Return when it may be published again."""
        return self._next

    def _postpone(self, now: float, least_s: float, reason: str) -> None:
        self._delay_s = min(LONGEST_S, max(least_s, 2 * self._delay_s))
        self._next, self.reason = now + self._delay_s, reason
