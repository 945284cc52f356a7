"""From a replica's page to an answer: which limit keeps a wanted share of the hit rate, or why none can be named."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcached.advisor.curve import limit_for
from kvcached.advisor.page import STOPPED, PageError
from kvcached.advisor.page_file import read_page
from kvcached.advisor.reading import (
    CHANGE,
    DISAGREEMENT,
    LEAST_REQUESTS,
    LONG,
    NOW,
    STALE_S,
    WINDOWS,
    Curve,
    curve_of,
    differing_by,
)
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.not_found import not_found_message
from kvcached.ledger.registration import SlotPlace
from kvcached.ledger.replicas import find_conflict
from kvcached.ledger.snapshot import look_at
from kvcached.limits import format_limit
from kvcached.printable_text import printable

if TYPE_CHECKING:
    from kvcached.advisor.page import Page
    from kvcached.ledger.replicas import Replica

PROMISE = 0.02
"""How far off a predicted rate may be; the answer's range comes from it."""

MOSTLY = 0.5
"""Which part of what is missing has to be hits on blocks in use before arrivals at the same moment are the cause."""

RECORDED = "recorded"
"""The window of a curve that comes from a trace: all of it."""

WARM = 3
"""How many times the advised limit should have been seen in prompt tokens."""


@dataclass(frozen=True)
class Goal:
    """What is wanted: a share of the attainable hit rate, or a hit rate."""

    share: float | None = None
    rate: float | None = None

    def wanted(self, attainable: float) -> float:
        """Return the hit rate that is wanted."""
        return self.rate if self.rate is not None else (self.share or 0.0) * attainable

    def describe(self) -> str:
        """Return the goal for people."""
        return f"a rate of {self.rate:g}" if self.rate is not None else f"{self.share:.0%} of what is attainable"


@dataclass(frozen=True)
class Advice:
    """What can be said of one replica. Rates are shares of prompt tokens, limits and sizes are tokens.

    ``room_tokens`` is the pool's free space nineteen times in twenty: more is never advised. Figures are None
    where nothing is known; ``refused`` says why no limit is advised.
    """

    replica: int
    limit_tokens: int | None = None
    capacity_tokens: int | None = None
    room_tokens: int | None = None
    in_use_tokens: int | None = None
    window: str | None = None
    curve: Curve | None = None
    attainable: float | None = None
    wanted: float | None = None
    observed_tokens: int = 0
    requests: int = 0
    advised_limit_tokens: int | None = None
    advised_range: tuple[int, int] | None = None
    refused: str | None = None
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        curve = self.curve
        return {
            "replica": self.replica,
            "limit_tokens": self.limit_tokens,
            "measured_hit_rate": curve.measured if curve else None,
            "in_use_hit_rate": curve.values[0] if curve else None,
            "attainable_hit_rate": self.attainable,
            "observed_tokens": self.observed_tokens,
            "model_error": curve.model_error if curve else None,
            "curve": [{"limit_tokens": limit, "hit_rate": rate} for limit, rate in (curve.points() if curve else ())],
            "advised_limit_tokens": self.advised_limit_tokens,
            "refused": self.refused,
            "warnings": list(self.warnings),
            "advised_range_tokens": list(self.advised_range) if self.advised_range else None,
            "wanted_hit_rate": self.wanted,
            "window": self.window,
            "requests": self.requests,
            "room_tokens": self.room_tokens,
            "in_use_tokens": self.in_use_tokens,
            "capacity_tokens": self.capacity_tokens,
        }


class NoInstanceError(Exception):
    """There is no one live instance to advise on; the message says why."""


def advise_instance(instance_name: str, ledger_dir: str, goal: Goal, window: str | None = None) -> tuple[Advice, ...]:
    """Return an advice for each replica of an instance.

    Raises :class:`NoInstanceError`, :class:`LedgerDirectoryError` or :class:`NativeLibraryError`.
    """
    with LedgerDirectory(ledger_dir, writable=False) as directory:
        snapshot = look_at(directory)
        replicas = snapshot.of(instance_name).replicas
        problem = find_conflict(replicas) if replicas else not_found_message(snapshot, instance_name)
        if problem:
            raise NoInstanceError(problem)
        return tuple(_advise_replica(directory, replica, goal, window) for replica in replicas)


def _advise_replica(directory: LedgerDirectory, replica: Replica, goal: Goal, window: str | None) -> Advice:
    first = replica.members[0]
    index = replica.slot.identity.replica
    place = SlotPlace(first.ledger.gpu, first.index, replica.slot.incarnation)
    try:
        page = read_page(directory, place)
    except PageError as error:
        return Advice(index, refused=f"no curve yet from this engine (is KVCACHED_ADVISOR=0 set?): {error}")
    advice = advise_page(page, goal, window)
    age_s = time.time() - page.updated_ns / 1e9
    if age_s > STALE_S and replica.slot.report.active_tokens > 0:
        advice = replace(advice, warnings=(*advice.warnings, f"the figures are {age_s:.0f} s old"))
    return replace(advice, replica=index)


def advise_page(page: Page, goal: Goal, window: str | None = None) -> Advice:
    """Return what follows from a page; ``window`` None takes *long* unless traffic is changing."""
    nothing = Advice(
        0,
        limit_tokens=page.limit_tokens,
        capacity_tokens=page.capacity_tokens,
        in_use_tokens=round(page.in_use_high),
        room_tokens=max(0, min(page.limits[-1], page.capacity_tokens - round(page.in_use_high))),
        observed_tokens=page.observed_tokens,
        requests=page.requests,
    )
    note = printable(page.note)
    if page.state == STOPPED:
        return replace(nothing, refused=f"the advisor failed and is off until the engine restarts: {note}")
    if min(one.prompt for one in page.windows) <= 0:
        return replace(nothing, refused="no requests seen yet")
    curves = {name: curve_of(page, one) for name, one in zip(WINDOWS, page.windows, strict=True)}
    warnings = [note] if note else []
    difference = differing_by(page)
    if difference > CHANGE:
        warnings.append(f"traffic is changing: the rates of the windows now and long differ by up to {difference:.2f}")
    chosen = window or (NOW if difference > CHANGE else LONG)
    seen = replace(nothing, window=chosen, curve=curves[chosen], warnings=tuple(warnings))
    return _choose(seen, curves[chosen], goal, page.block_tokens)


def advise_recorded(curve: Curve, goal: Goal, requests: int, prompt_tokens: int, block_tokens: int) -> Advice:
    """Return what follows from the curve of recorded traffic, whatever pool it will be served from."""
    seen = Advice(
        0,
        room_tokens=curve.room_tokens,
        window=RECORDED,
        curve=curve,
        observed_tokens=prompt_tokens,
        requests=requests,
    )
    return _choose(seen, curve, goal, block_tokens)


def _choose(seen: Advice, curve: Curve, goal: Goal, block_tokens: int) -> Advice:
    """Find the answer, or the reason for none."""
    room = seen.room_tokens or 0
    attainable = curve.at(curve.room_tokens)
    wanted = goal.wanted(attainable)
    seen = replace(seen, attainable=attainable, wanted=wanted)
    beyond = curve.values[-1] - attainable
    if beyond > PROMISE:
        seen = _warned(
            seen,
            f"the pool is too small, not the limit: running requests take all but {curve.room_tokens:,} tokens, "
            f"and a larger pool would add {beyond:.2f}",
        )
    refused = _refusal(seen, curve, goal)
    limit = None if refused else limit_for(curve.limits, curve.values, wanted)
    if limit is None:
        return replace(seen, refused=refused or f"no limit reaches {wanted:.3f}")
    advised = _blocks_up(limit, block_tokens)
    if advised > room:
        advised = room
        seen = _warned(
            seen, f"one time in twenty there is room for fewer than {room:,} idle tokens; no larger limit is advised"
        )
    if seen.observed_tokens < advised:
        text = f"only {seen.observed_tokens:,} prompt tokens seen, fewer than the {advised:,} that would be advised"
        return replace(seen, refused=f"{text}; wait for more")
    if seen.observed_tokens < WARM * advised:
        seen = _warned(seen, f"{seen.observed_tokens:,} prompt tokens are little evidence for a limit of {advised:,}")
    low = limit_for(curve.limits, curve.values, wanted - PROMISE) or 0.0
    high = limit_for(curve.limits, curve.values, wanted + PROMISE)
    high = room if high is None else min(high, room)
    span = (min(_blocks_up(low, block_tokens), advised), max(advised, min(_blocks_up(high, block_tokens), room)))
    return replace(seen, advised_limit_tokens=advised, advised_range=span)


def _refusal(seen: Advice, curve: Curve, goal: Goal) -> str | None:
    """Return why no limit can be advised at all."""
    attainable, wanted = seen.attainable or 0.0, seen.wanted or 0.0
    if seen.requests < LEAST_REQUESTS:
        return f"only {seen.requests} requests seen; {LEAST_REQUESTS} are needed"
    if abs(curve.model_error) > DISAGREEMENT:
        return (
            f"model and engine disagree at the limit in force: {curve.measured - curve.model_error:.3f} expected, "
            f"{curve.measured:.3f} measured{_why_less(curve)}"
        )
    if wanted > attainable:
        return f"{goal.describe()} cannot be reached: this traffic allows at most {attainable:.3f}"
    if wanted <= curve.values[0]:
        return (
            f"{goal.describe()} is {wanted:.3f}, and blocks in use alone give {curve.values[0]:.3f}: "
            f"that needs no idle cache, so any limit will do; ask for more"
        )
    return None


def _why_less(curve: Curve) -> str:
    """Say so where hits on blocks in use, which the model counts and the engine missed, can be what is missing.

    The model sees a prompt's blocks from the moment a request begins, an engine only once they are computed: of
    requests with equal prompts that arrive together it computes each.
    """
    if curve.model_error >= 0 or curve.model_in_use < -curve.model_error * MOSTLY:
        return ""
    return (
        "; the likely cause is equal prompts that arrive at the same moment, which cannot hit each other "
        "(replay a trace with its arrival times; on the rig: --speed)"
    )


def _warned(advice: Advice, text: str) -> Advice:
    return replace(advice, warnings=(*advice.warnings, text))


def _blocks_up(limit: float, block_tokens: int) -> int:
    return math.ceil(limit / block_tokens - 1e-9) * block_tokens


def limit_phrase(advice: Advice) -> str:
    """Return the advised limit with its range, for people."""
    low, high = advice.advised_range or (0, 0)
    return f"{format_limit(advice.advised_limit_tokens or 0)} ({low:,} to {high:,})"
