"""Everything that bounds one replica in one object: its limit, its cap, and the memory behind both.

An engine's plugin calls :meth:`ReplicaPolicy.on_release` and :meth:`ReplicaPolicy.on_step` where it would call those of
a :class:`kvcached.policy.RetentionPolicy`; a step with nothing to do costs one look at a flag. Scheduler thread only.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached.values import UNLIMITED, Bound, Outcome, Update, no_cap

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.capacity import CapacityPolicy
    from kvcached.memory.elastic import Elastic
    from kvcached.memory.pool_memory import PoolMemory
    from kvcached.policy import RetentionPolicy
    from kvcached.values import Report


class ReplicaPolicy:
    """The limit and the cap of one process, enforced in turns so that one step never does the work of both."""

    def __init__(
        self,
        retention: RetentionPolicy,
        capacity: CapacityPolicy | None,
        memory: PoolMemory,
        *,
        token_bytes: int,
        no_cap_reason: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join the parts. ``capacity`` is None where the pool cannot be capped, for ``no_cap_reason``.

        ``token_bytes`` is what one token of KV takes over all ranks. ``clock`` is for elastic memory alone.
        """
        self.retention = retention
        self.capacity = capacity
        self.pending = False
        """Whether :meth:`on_step` has anything to do."""
        self._memory = memory
        self._elastic: Elastic | None = None
        self._clock = clock
        self._put_off = False
        self._token_bytes = token_bytes
        self._no_cap = no_cap(no_cap_reason)
        self._note_pending()

    @property
    def draining(self) -> bool:
        """Whether an engine without work has to keep stepping: an update or the return of memory is under way."""
        capacity = self.capacity
        bounds = self.retention.draining or self._put_off or (capacity is not None and capacity.draining)
        return bounds or self._memory.busy

    @property
    def wake_at(self) -> float | None:
        """When an engine without work has to step although nothing happens (monotonic, seconds); None for never."""
        return None if self._elastic is None else self._elastic.wake_at

    @property
    def limit_tokens(self) -> int:
        """The limit in force, in tokens; -1 is unlimited."""
        return self.retention.limit_tokens

    @property
    def cap_tokens(self) -> int:
        """The cap in force, in tokens; -1 is the whole pool."""
        return UNLIMITED if self.capacity is None else self.capacity.cap_tokens

    @property
    def returns(self) -> str:
        """``yes``, or why memory is not returned in this process, as far as is known."""
        return self._memory.figures().returns

    @property
    def settled_revisions(self) -> tuple[int, int]:
        """The newest revisions that were applied or rejected here, of the limit and of the cap."""
        return self.settled_revision(Bound.LIMIT), self.settled_revision(Bound.CAP)

    def become_elastic(self, elastic: Elastic) -> None:
        """Let ``elastic`` see every step from now on."""
        self._elastic = elastic
        self._note_pending()

    def settled_revision(self, bound: Bound) -> int:
        """Return the newest revision of ``bound`` that was applied or rejected here."""
        if bound is Bound.LIMIT:
            return self.retention.settled_revision
        return self._no_cap.settled_revision if self.capacity is None else self.capacity.settled_revision

    def update(self, update: Update) -> None:
        """Take a new limit or cap over, as ``update.bound`` says; a cap is refused where the pool cannot be capped."""
        if update.bound is Bound.LIMIT:
            self.retention.update(update)
        elif self.capacity is None:
            self.reject(update, Outcome.UNSUPPORTED_ENGINE, self._no_cap.reason)
        else:
            self.capacity.update(update)
        self._note_pending()

    def reject(self, update: Update, outcome: Outcome, reason: str) -> None:
        """Settle ``update`` without applying it; what is in force stays."""
        if update.bound is Bound.LIMIT:
            self.retention.reject(update, outcome, reason)
        elif self.capacity is not None:
            self.capacity.reject(update, outcome, reason)
        else:
            self._no_cap = replace(self._no_cap, settled_revision=max(update.revision, self._no_cap.settled_revision))

    def on_release(self) -> None:
        """Keep to both bounds after a request released its blocks. Call before the scheduler can hand them out."""
        self.retention.on_release()
        self.keep_cap()

    def keep_limit(self) -> None:
        """Keep to the limit alone: for an engine that releases blocks before they are free, and calls both."""
        self.retention.on_release()
        self._note_pending()

    def keep_cap(self) -> None:
        """Keep to the cap alone, once what was released is free."""
        if self.capacity is not None:
            if self.retention.draining:
                self._put_off = True  # the cap's turn comes when the limit's drop is done
            else:
                self.capacity.on_release()
        self._note_pending()

    def on_step(self) -> None:
        """Go on with what is done in pieces. Call once per scheduler step, idle or not; hot."""
        if self.pending:
            self._go_on()

    def lift(self) -> None:
        """Give withheld blocks back for a call of the engine that wants its pool whole; see ``CapacityPolicy.lift``."""
        if self.capacity is not None:
            self.capacity.lift()
        self._note_pending()

    def resume(self) -> None:
        """Take them out again, beginning with one chunk."""
        if self.capacity is not None:
            self.capacity.resume()
        self._note_pending()

    def report(self) -> Report:
        """Return what is in force, what became of the newest publications, and the pool's figures as they are now."""
        figures = self._memory.figures()
        return replace(
            self.retention.report(),
            cap=self._no_cap if self.capacity is None else self.capacity.report(),
            token_bytes=self._token_bytes,
            pool_bytes=figures.pool_bytes,
            resident_bytes=figures.resident_bytes,
            returned_bytes=figures.returned_bytes,
            returns=figures.returns,
        )

    def _go_on(self) -> None:
        retention, capacity, memory = self.retention, self.capacity, self._memory
        if self._elastic is not None:
            self._elastic.on_step(self._clock())
        memory.advance()
        if retention.draining:
            retention.on_step()
        elif capacity is not None:
            if self._put_off:
                self._put_off = False
                capacity.on_release()
            capacity.on_step()
        self._note_pending()

    def _note_pending(self) -> None:
        self.pending = self._elastic is not None or self.draining
