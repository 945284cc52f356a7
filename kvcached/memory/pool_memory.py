"""Which rows of a pool hold memory, and the return of free ones in pieces that do not hold a step up.

The plugin of an engine tells three things: rows that requests are given (:meth:`PoolMemory.take`), free rows whose
memory may go (:meth:`PoolMemory.offer`), and that a step has ended (:meth:`PoolMemory.advance`). Engine thread only.

Returning is content-neutral, because a free row is never read before it is written; so ranks need not agree on it, and
nothing here may decide an eviction or an allocation.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from typing import TYPE_CHECKING

from kvcached.memory.figures import RETURNS, MemoryFigures
from kvcached.memory.regions import rows_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvcached.memory.regions import PoolShape, Run
    from kvcached.memory.returning import Returned, Transport

PIECE_BYTES = 32 << 20
"""What one step returns per rank at most: ``madvise`` takes 64 to 130 ms per GiB, so 2 to 4 ms."""

CALL_BYTES = 128 << 10
"""What one more ``madvise`` call costs, as bytes that could be returned in that time: about 8 µs."""

_RETURNED = 0
_OFFERED = 1
_FIRST_TICK = 2

_log = logging.getLogger(__name__)


class PoolMemory:
    """The memory of one pool, as its engine's scheduler sees it."""

    def __init__(self, shape: PoolShape, transport: Transport | None, obstacle: str = "") -> None:
        """Follow a pool of ``shape`` whose rows all hold memory now.

        ``obstacle`` says why its memory cannot be returned: then nothing is ever sent, and ``transport`` may be None.
        """
        self.shape = shape
        self.tick = _FIRST_TICK
        """What rows that are taken now are marked with; see ``elastic``."""
        self.follows_taking = False
        """Whether :meth:`take` has to be called at all; plugins skip the call while it is False."""
        self.taken_rows = 0
        """How many rows requests were given since somebody last set this to 0."""
        self._keeps_marks = False
        self._transport = transport
        self._obstacle = obstacle or ("" if transport is not None else "nothing here can return it")
        self._marks = array("I", [_FIRST_TICK]) * shape.rows
        self._queue: deque[int] = deque()
        self._in_flight: deque[int] = deque()
        self._offered_rows = 0
        self._returned_rows = 0
        self._kept_bytes = 0.0
        self._shortfall = ""

    @property
    def busy(self) -> bool:
        """Whether rows were offered whose memory is not back yet. It ends without them if that is refused."""
        return bool(self._offered_rows or self._in_flight)

    @property
    def gone_rows(self) -> int:
        """How many rows are returned or about to be."""
        return self._returned_rows + self._offered_rows

    @property
    def can_return(self) -> bool:
        """Whether memory is returned here at all, as far as is known."""
        return not self._obstacle

    def keep_marks(self) -> None:
        """Mark every row that is taken with the present tick from now on, whether or not rows were returned."""
        self._keeps_marks = self.follows_taking = True

    def is_returned(self, row: int) -> bool:
        """Return whether the memory of ``row`` was sent away and no request got the row since."""
        return self._marks[row] == _RETURNED

    def holds(self, row: int, *, not_taken_since: int) -> bool:
        """Return whether ``row`` holds memory, is not offered, and was last taken at ``not_taken_since`` or before."""
        return _FIRST_TICK <= self._marks[row] <= not_taken_since

    def take(self, rows: Collection[int]) -> None:
        """Note that requests get ``rows``, which will hold memory from now on. Call before they are written."""
        marks, tick = self._marks, self.tick
        came_back = 0
        for row in rows:
            mark = marks[row]
            if mark < _FIRST_TICK:
                if mark == _RETURNED:
                    came_back += 1
                else:
                    self._offered_rows -= 1
            marks[row] = tick
        self.taken_rows += len(rows)
        if came_back:
            self._kept_bytes *= 1 - came_back / self._returned_rows
            self._returned_rows -= came_back
        self._note_following()

    def offer(self, rows: Iterable[int]) -> None:
        """Let the memory of ``rows``, all of which are free, be returned by the next steps.

        Rows that are returned or offered already are passed over, and so is everything where memory is not returned.
        """
        if self._obstacle:
            return
        marks = self._marks
        fresh = sorted({row for row in rows if marks[row] >= _FIRST_TICK})
        for row in fresh:
            marks[row] = _OFFERED
        self._queue.extend(fresh)
        self._offered_rows += len(fresh)
        self._note_following()

    def advance(self) -> None:
        """Take the answers in and send the next piece. Call at the end of each step, idle or not, while ``busy``."""
        transport = self._transport
        if transport is None or not self.busy:
            return
        for reply in transport.replies():
            self._note_reply(reply)
        if self._in_flight or self._obstacle:
            return
        runs = self._next_piece()
        if runs:
            self._send(transport, runs)

    def figures(self) -> MemoryFigures:
        """Return what the pool's memory is doing, by this side's own count. O(1)."""
        returned = self._returned_rows * self.shape.row_bytes_of_all_ranks - round(self._kept_bytes)
        returns = self._obstacle or self._shortfall or RETURNS
        return MemoryFigures(self.shape.pool_bytes, max(returned, 0), returns)

    def _send(self, transport: Transport, runs: list[Run]) -> None:
        rows = rows_in(runs)
        self._returned_rows += rows
        self._kept_bytes += rows * self.shape.row_bytes_of_all_ranks  # until the answer says what is back
        self._in_flight.append(rows)
        transport.send(runs)
        for reply in transport.replies():
            self._note_reply(reply)

    def _next_piece(self) -> list[Run]:
        """Take rows from the front of the queue for as long as one step may spend on them."""
        queue, marks = self._queue, self._marks
        row_cost, run_cost = self.shape.row_bytes, CALL_BYTES * self.shape.regions
        budget = PIECE_BYTES
        runs: list[Run] = []
        first = end = -1
        while queue and budget > 0:
            row = queue.popleft()
            if marks[row] != _OFFERED:
                continue  # taken by a request since it was offered
            marks[row] = _RETURNED
            self._offered_rows -= 1
            budget -= row_cost
            if row == end:
                end += 1
                continue
            budget -= run_cost
            if end > first:
                runs.append((first, end))
            first, end = row, row + 1
        if end > first:
            runs.append((first, end))
        return runs

    def _note_reply(self, reply: Returned) -> None:
        """Count what is back; a refusal of everything ends all returning, so that nothing is tried in a loop."""
        rows = self._in_flight.popleft()
        self._kept_bytes = max(self._kept_bytes - reply.returned_bytes, 0.0)
        if not reply.reason:
            return
        if not self._shortfall:
            _log.warning("memory of free KV blocks was not returned in full: %s", reply.reason)
        self._shortfall = reply.reason
        if rows and reply.returned_bytes == 0:
            self._obstacle = reply.reason
            self._withdraw_offers()

    def _withdraw_offers(self) -> None:
        for row in self._queue:
            if self._marks[row] == _OFFERED:
                self._marks[row] = _FIRST_TICK
        self._queue.clear()
        self._offered_rows = 0

    def _note_following(self) -> None:
        self.follows_taking = self._keeps_marks or self._returned_rows > 0 or self._offered_rows > 0
