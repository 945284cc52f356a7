"""The advisor inside an engine: tells the estimator what happens, and the outside what came of it.

No failure leaves this module: the first exception switches the advisor off for good, is logged and counted, and is
reported in the page.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from kvcached.advisor.page import STOPPED, WATCHING, Page, PageWindow
from kvcached.guards import call_guarded, log_fault
from kvcached.ledger.directory import LedgerDirectoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.advisor.estimator import Estimator
    from kvcached.advisor.page_file import PageWriter
    from kvcached.ledger.registration import SlotPlace

SAMPLE_S = 0.1
"""How often it is looked at what requests hold and which limit is in force."""

WRITE_S = 1.0
"""How often the page is written at most by a busy engine."""

RETRY_S = 60.0
"""How long after a failure the page is tried to be written again."""

IN_USE_SAMPLES = 600
"""How many of the looks at what requests hold count: those of a minute."""

_HIGH = 0.95

_P = ParamSpec("_P")
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Figures:
    """What is in force now, in tokens: the limit (-1 for none), what requests hold, and the capacity."""

    limit_tokens: int
    active_tokens: int
    capacity_tokens: int


def attempt(build: Callable[[], _T]) -> _T | None:
    """Return what ``build`` makes; log and return None if it cannot, for an engine serves without an advisor, too."""
    return call_guarded(log_fault(_log.warning, "the advisor could not be started; serving is not affected"), build)


class Observer:
    """The advisor of one replica. All methods are for the scheduler's thread; none raises."""

    def __init__(
        self,
        estimator: Estimator,
        block_tokens: int,
        figures_of: Callable[[], Figures],
        writer: PageWriter,
        place_of: Callable[[], SlotPlace | None],
        *,
        note: str = "",
    ) -> None:
        """Watch for ``estimator``.

        Args:
            estimator: What learns from the events.
            block_tokens: The size of the engine's blocks.
            figures_of: Returns the figures in force now; O(1).
            writer: Writes the page.
            place_of: Returns the slot that the replica owns now, or None while it has none.
            note: What users should know about this replica's curve, if anything.

        """
        self._estimator: Estimator | None = estimator
        self._figures_of = figures_of
        self._writer = writer
        self._place_of = place_of
        self._in_use: deque[int] = deque(maxlen=IN_USE_SAMPLES)
        self._changed = True
        self._next_sample = 0.0
        self._next_write = 0.0
        empty = tuple(PageWindow(one.half_life, 0, 0, 0, tuple(one.buckets)) for one in estimator.windows)
        self._page = Page(0, 0, 0, 0, -1, 0, 0.0, 0.0, block_tokens, WATCHING, 0, note, tuple(estimator.limits), empty)

    def watch(self, event: Callable[Concatenate[Estimator, _P], None], *args: _P.args, **named: _P.kwargs) -> None:
        """Tell the estimator: call ``event`` with it and the arguments."""
        estimator = self._estimator
        if estimator is None:
            return
        self._changed = True
        call_guarded(self._stop, event, estimator, *args, **named)

    def tick(self, *, idle: bool = False) -> None:
        """Look at the engine's figures and write the page, when due. Call once per step; nearly always it is not due.

        With ``idle``, the engine is about to sleep and may not come by again for long.
        """
        now = time.monotonic()
        if now < self._next_sample and not idle:
            return
        self._next_sample = now + SAMPLE_S
        call_guarded(self._stop, self._look, now, idle=idle)

    def close(self) -> None:
        """Remove the page."""
        self._writer.close()

    def _look(self, now: float, *, idle: bool) -> None:
        try:
            figures = self._figures_of()
            if figures.active_tokens > 0:  # what an idle engine does not need says nothing of a busy one
                self._in_use.append(figures.active_tokens)
            if self._estimator is not None:
                self._estimator.set_limit(_effective_limit(figures))
                self._estimator.squeeze(_room(figures))
            if now >= self._next_write or (idle and self._changed and self._next_write - now <= WRITE_S):
                self._next_write = now + WRITE_S
                self._write(figures)
        except (OSError, LedgerDirectoryError) as error:
            self._next_write = now + RETRY_S
            _log.warning("the advisor's page could not be written (will try again): %s", error)

    def _write(self, figures: Figures) -> None:
        place = self._place_of()
        if place is None:
            return
        page = self._page = self._updated(figures)
        self._writer.write(place, replace(page, incarnation=place.incarnation, updated_ns=time.time_ns()))
        self._changed = False

    def _updated(self, figures: Figures) -> Page:
        """Return the page as it should be now."""
        held = sorted(self._in_use) or [0]
        page = replace(
            self._page,
            limit_tokens=figures.limit_tokens,
            capacity_tokens=figures.capacity_tokens,
            in_use_mean=sum(held) / len(held),
            in_use_high=float(held[int(_HIGH * (len(held) - 1))]),
        )
        estimator = self._estimator
        if estimator is None:
            return page
        estimator.fold()
        return replace(
            page,
            observed_tokens=estimator.observed_tokens,
            requests=estimator.requests,
            windows=tuple(
                PageWindow(one.half_life, one.prompt, one.hit, one.predicted, tuple(one.buckets))
                for one in estimator.windows
            ),
        )

    def _stop(self, error: Exception) -> None:
        """Turn the advisor off, and let the page say so at the next tick."""
        if self._estimator is None:  # the page itself cannot be made
            self._next_write = time.monotonic() + RETRY_S
            return
        self._estimator = None
        self._changed = True
        self._next_write = 0.0
        self._page = replace(
            self._page,
            state=STOPPED,
            failures=self._page.failures + 1,
            note=f"{type(error).__name__}: {error}",
        )
        _log.error("the advisor failed and is now off; serving is not affected", exc_info=error)


def _room(figures: Figures) -> int:
    """Return the pool's free space beside running requests, in tokens."""
    return max(0, figures.capacity_tokens - figures.active_tokens)


def _effective_limit(figures: Figures) -> int:
    """Return how many tokens can be idle: the limit, or the pool's free space beside running requests."""
    room = _room(figures)
    return room if figures.limit_tokens < 0 else min(figures.limit_tokens, room)
