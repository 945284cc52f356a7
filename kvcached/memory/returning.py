"""How runs of rows reach whoever can return their memory, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvcached.memory.madvise import return_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.memory.regions import Region, Run


class Returned(NamedTuple):
    """The answer to one sending: what really came back."""

    returned_bytes: int
    """Over all ranks."""
    reason: str
    """Why the rest did not; ``""`` where only the parts of pages at the ends of runs are missing."""


class Transport(Protocol):
    """Carries runs of rows to all ranks that hold them. Engine thread only; neither call may wait."""

    def send(self, runs: list[Run]) -> None:
        """Let the memory of ``runs`` be returned: after all steps handed out before, before all later ones."""

    def replies(self) -> list[Returned]:
        """Return one answer for each sending that was completed since the last call, in order."""


class LocalTransport:
    """The transport of an engine whose tensors are in this process: returns at once.

    ``ranks`` is how many ranks return the same rows in their own processes at the same step; they are taken to give
    back as much as this one.
    """

    def __init__(self, regions: Sequence[Region], ranks: int = 1) -> None:
        self._regions = list(regions)
        self._ranks = ranks
        self._replies: list[Returned] = []

    def send(self, runs: list[Run]) -> None:
        """Return the memory of ``runs`` now."""
        returned_bytes, reason = return_rows(self._regions, runs)
        self._replies.append(Returned(returned_bytes * self._ranks, reason))

    def replies(self) -> list[Returned]:
        """Return the answers to the sendings since the last call."""
        replies, self._replies = self._replies, []
        return replies
