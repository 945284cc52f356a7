"""The constants of balancing, each with its reason. They were chosen by simulation and are no options."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PERIOD_S = 10.0
"""How often a decision is made. A minute is too slow: bursts then cost more than balancing gains."""

LOOKS_PER_PERIOD = 10
"""How many looks at the engines one decision has behind it."""

SHRINK_WAIT_S = 5.0
"""How long a shrink is waited for. Engines take milliseconds; one that does not answer still holds its share."""

ABSENT_S = 600.0
"""How long the share of an instance that has ended stays reserved: engines take minutes to start again."""

FLOOR_OF_EQUAL = 0.1
"""The default floor as a part of the equal share: what a burst shorter than two periods finds."""


@dataclass(frozen=True)
class Rules:
    """What decides about changes of traffic and about moves. Times are seconds.

    ``units`` is how finely the budget is divided. A move has to gain ``least_gain`` of all prompt tokens, and what it
    throws away has to be regained within ``payback_s``. Traffic is the mean since its rate last changed, within
    ``memory_s``: a change is a ``change_factor`` between the last ``recent_requests`` requests, not older than
    ``recent_s``, and what came before, judged only where ``judged_requests`` came or were expected. Who was silent for
    ``silent_s`` gets nothing more, since it could not fill it.
    """

    units: int = 200
    least_gain: float = 0.005
    payback_s: float = 300.0
    memory_s: float = 900.0
    recent_s: float = 600.0
    silent_s: float = 60.0
    recent_requests: int = 100
    judged_requests: int = 30
    change_factor: float = 1.6


def rules_for(period_s: float) -> Rules:
    """Return the rules of a supervisor that decides every ``period_s`` seconds: its sense of time goes with it."""
    scale = period_s / DEFAULT_PERIOD_S
    rules = Rules()
    return Rules(
        payback_s=rules.payback_s * scale,
        memory_s=rules.memory_s * scale,
        recent_s=rules.recent_s * scale,
        silent_s=rules.silent_s * scale,
    )
