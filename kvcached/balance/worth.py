"""What a limit is worth to an instance, by its advisor's pages, and why one may not rely on them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.advisor.page import STOPPED
from kvcached.advisor.reading import LEAST_REQUESTS, STALE_S, current_window, curve_of
from kvcached.printable_text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.advisor.page import Page
    from kvcached.advisor.reading import Curve
    from kvcached.balance.engine_look import InstanceLook

DISTRUST = 0.05
"""How far model and engine may differ. More than for advice: after a raise the model sees hits that a cache which is
not full yet does not have, and a division depends on the curve's shape alone."""

WARM_TIMES = 3
"""How many times the equal share should have been seen in prompt tokens, where there is much traffic."""


@dataclass(frozen=True)
class Worth:
    """The hit rate of an instance over its limit: of each replica the model's curve and its part of the traffic."""

    curves: tuple[tuple[Curve, float], ...]

    def rate_at(self, tokens: float) -> float:
        """Return the hit rate that the model sees at a limit of so many idle tokens for each replica."""
        return sum(curve.at(tokens) * part for curve, part in self.curves)


def worth_of(look: InstanceLook) -> Worth | None:
    """Return what limits are worth to an instance; None where no page says anything yet."""
    pages = [replica.page for replica in look.replicas if replica.page is not None]
    windows = [current_window(page) for page in pages]
    total = sum(window.prompt for window in windows)
    if total <= 0:
        return None
    found = [
        (curve_of(page, window, anchored=False), window.prompt / total)
        for page, window in zip(pages, windows, strict=True)
        if window.prompt > 0
    ]
    return Worth(tuple(found))


def unusable_curve(look: InstanceLook) -> str:
    """Return why an instance's curve says nothing about its engine and will not soon, or an empty text."""
    for replica in look.replicas:
        page = replica.page
        if page is None:
            return f"no curve: {replica.page_problem}"
        if page.state == STOPPED:
            return f"its advisor failed and is off until the engine restarts: {printable(page.note)}"
        if page.note:
            return f"its curve is not that of its cache: {printable(page.note)}"
    return ""


def young_curve(look: InstanceLook, equal_tokens: float, *, busy: bool) -> str:
    """Return why an instance's curve is not relied on yet, or an empty text.

    ``equal_tokens`` is what an equal share would be; ``busy`` says that the instance has as much traffic as the mean.
    """
    pages = [replica.page for replica in look.replicas if replica.page is not None]
    requests = sum(page.requests for page in pages)
    if requests < LEAST_REQUESTS:
        return f"{requests} of {LEAST_REQUESTS} requests seen"
    seen = sum(page.observed_tokens for page in pages)
    wanted = WARM_TIMES * equal_tokens
    if busy and seen < wanted:
        return f"{seen:,} prompt tokens seen; {wanted:,.0f} are needed to judge shares of this size"
    return _stale(look) or _wrong(pages)


def _stale(look: InstanceLook) -> str:
    now_s = time.time()
    for replica in look.replicas:
        if replica.page is not None and replica.active_tokens > 0:
            age_s = now_s - replica.page.updated_ns / 1e9
            if age_s > STALE_S:
                return f"its advisor's figures are {age_s:.0f} s old"
    return ""


def _wrong(pages: Sequence[Page]) -> str:
    for page in pages:
        window = current_window(page)
        if window.prompt <= 0:
            return "no requests counted yet"
        error = (window.hit - window.predicted) / window.prompt
        if abs(error) > DISTRUST:
            return f"model and engine differ by {error:+.3f} at the limit in force"
    return ""
