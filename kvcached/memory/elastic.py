"""Elastic memory: free rows that nobody needed for a while give their memory back, and take it again on demand.

*Needed* is judged by count. Of the rows that are free now, as many stay as became used at most within ``after_s``, and
while requests run, as many as let them reach their peak of the last twelve times ``after_s`` and a quarter more: a
steady load pays no page faults. This works where the engine hands out first what was freed last, or at least hands out
returned rows after all others; the plugin has to see to that order.

Whether a row holds memory changes no output and no decision, so this may read the clock and ranks need not agree.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvcached.memory.pool_memory import PoolMemory

QUARTERS = 4
"""Into how many parts the time is cut within which rows have to be free: they go after one to five quarters of it."""

PEAK_QUARTERS = 12 * QUARTERS
"""For how many parts of the time the peak of a load is remembered; an engine without requests forgets it at once."""

PEAK_MARGIN = 1.25
"""How much more than the remembered peak is kept: the peaks of a steady load differ from minute to minute."""

SCAN_ROWS = 8192
"""How many rows one step looks at: under 1 ms."""


class FreeRows(Protocol):
    """The rows that an engine can hand out without evicting anything; those that the cap withholds are not free."""

    def free_rows(self) -> int:
        """Return how many there are. O(1)."""

    def active_rows(self) -> int:
        """Return how many rows running requests hold. O(1)."""

    def withheld_rows(self) -> int:
        """Return how many rows the cap withholds. O(1)."""

    def rows_after(self, keep: int) -> Iterable[int]:
        """Return the free rows but the ``keep`` that are handed out first.

        What is returned is read bit by bit over the next steps, so it must bear that rows come and go meanwhile.
        """


class Elastic:
    """Watches how many rows are free and offers those that can be spared to a :class:`PoolMemory`. Engine thread."""

    def __init__(self, memory: PoolMemory, free: FreeRows, after_s: float, now: float) -> None:
        """Offer rows of ``memory`` that were spare for ``after_s`` seconds, counted from ``now`` (monotonic)."""
        self._memory = memory
        self._free = free
        self._quarter_s = after_s / QUARTERS
        self._quarter_ends = now + self._quarter_s
        self._seen = self._least = free.free_rows()
        self._least_by_quarter: deque[int] = deque(maxlen=QUARTERS)
        self._peak = self._seen_active = 0
        self._peaks: deque[int] = deque(maxlen=PEAK_QUARTERS)
        self._candidates: Iterator[int] | None = None
        self._wanted = 0
        self._settled = False
        memory.keep_marks()

    @property
    def wake_at(self) -> float | None:
        """When an idle engine has to call :meth:`on_step` (monotonic, seconds; 0 for at once); None for never."""
        if not self._memory.can_return:
            return None
        if self._settled:
            return 0.0 if self._has_changed(self._free.free_rows()) else None
        return self._quarter_ends if self._candidates is None else 0.0

    def on_step(self, now: float) -> None:
        """Note what is free, and offer what can be spared. Call after each step, and at :attr:`wake_at` when idle."""
        free = self._free.free_rows()
        ended = now >= self._quarter_ends
        quiet = self._settled or not (ended or self._candidates is not None)
        if quiet and not self._has_changed(free):
            return
        least, peak = self._extremes(free)
        if ended:
            self._end_quarters(now, least, peak)
        self._note(free, least, peak)
        if self._candidates is not None:
            self._scan(self._candidates)
        elif ended:
            self._look(free)

    def _extremes(self, free: int) -> tuple[int, int]:
        """Return the fewest free rows and the most in use since the last step.

        A step's requests may have come and gone before anybody looks. So all rows that were taken count as taken before
        any was given back, which is at most one step's too many.
        """
        taken = self._memory.taken_rows
        least = min(free, max(self._seen - taken, 0))
        return least, max(self._free.active_rows(), self._seen_active + taken)

    def _note(self, free: int, least: int, peak: int) -> None:
        """Note what is free and in use after this step, and what was since the last one."""
        self._seen = free
        self._least = min(self._least, least)
        self._seen_active = self._free.active_rows()
        self._peak = max(self._peak, peak)
        self._memory.taken_rows = 0
        self._settled = False

    def _has_changed(self, free: int) -> bool:
        """Return whether rows became free, or were taken or given up by requests, since the last step."""
        return free != self._seen or self._memory.taken_rows > 0 or self._free.active_rows() != self._seen_active

    def _end_quarters(self, now: float, least: int, peak: int) -> None:
        """Close the quarters that have ended.

        What was so since the last step counts in all of them, because a step can be longer than a quarter and does not
        tell when it took its rows. An idle engine has steps at their ends.
        """
        ended = 1 + int((now - self._quarter_ends) / self._quarter_s)
        self._least_by_quarter.extend([min(self._least, least), *[least] * min(ended - 1, QUARTERS)])
        self._peaks.extend([max(self._peak, peak), *[peak] * min(ended - 1, PEAK_QUARTERS)])
        self._least, self._peak = least, peak
        self._memory.tick += ended
        self._quarter_ends += ended * self._quarter_s

    def _look(self, free: int) -> None:
        """Begin to offer rows if more of the free ones hold memory than were needed lately."""
        if len(self._least_by_quarter) < QUARTERS:
            return
        fallen = free - min(free, *self._least_by_quarter)
        needed = max(fallen, self._short_of_peak())
        holding = free - (self._memory.gone_rows - self._free.withheld_rows())
        self._wanted = holding - needed
        if self._wanted > 0 and self._memory.can_return:
            self._candidates = iter(self._free.rows_after(needed))
            self._scan(self._candidates)
        else:
            # Without a step of the engine's, needs change only as quarters with more in use are forgotten.
            self._settled = fallen == 0 and all(peak == self._free.active_rows() for peak in self._peaks)

    def _short_of_peak(self) -> int:
        """Return how many free rows the requests that run would need to get to their remembered peak once more."""
        if not any(islice(reversed(self._peaks), QUARTERS)):
            self._peaks.clear()
            return 0
        return int(PEAK_MARGIN * max(self._peaks)) - self._free.active_rows()

    def _scan(self, candidates: Iterator[int]) -> None:
        """Offer those of the next candidates that hold memory and were not taken lately."""
        memory = self._memory
        oldest = memory.tick - QUARTERS
        rows = list(islice(candidates, SCAN_ROWS))
        spare = [row for row in rows if memory.holds(row, not_taken_since=oldest)][: self._wanted]
        memory.offer(spare)
        self._wanted -= len(spare)
        if len(rows) < SCAN_ROWS or self._wanted <= 0:
            self._candidates = None
