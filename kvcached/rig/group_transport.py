"""Returns the memory of rows on this rank, and answers for all ranks once they have done the same."""

from __future__ import annotations

from kvcached.memory.returning import LocalTransport, Returned


class GroupTransport(LocalTransport):
    """The transport of one rank.

    All ranks return the same rows at the same step, but not at the same moment. Rank 0, which tells publishers that
    memory is back, therefore waits until the others have finished that step.
    """

    waits_for_ranks = False
    """Whether answers are held back until :meth:`confirm`: on rank 0 of a running group."""

    _unconfirmed: tuple[Returned, ...] = ()
    _confirmed: tuple[Returned, ...] = ()

    @property
    def unconfirmed(self) -> bool:
        """Whether there is an answer that the other ranks have to confirm."""
        return bool(self._unconfirmed)

    def confirm(self) -> None:
        """Note that all ranks have finished the steps before."""
        self._confirmed += self._unconfirmed
        self._unconfirmed = ()

    def replies(self) -> list[Returned]:
        """Return the answers that are true of all ranks."""
        fresh = super().replies()
        if not self.waits_for_ranks:
            return fresh
        ready = list(self._confirmed)
        self._confirmed = ()
        self._unconfirmed += tuple(fresh)
        return ready
