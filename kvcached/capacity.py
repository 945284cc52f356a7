"""The cap of one replica: how many tokens of KV it may hold in all, kept by taking free blocks out of its pool.

The twin of :mod:`kvcached.policy`, and under the same rule: every rank of a replica holds one :class:`CapacityPolicy`
and calls it at the same steps with the same updates, so it must take the same blocks everywhere. It reads no clock, no
file and no environment; chunks are counts. Whether memory is back already, which ranks need not agree on, decides only
what is reported.

All methods are for the scheduler's own thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from kvcached.bound_policy import BoundPolicy
from kvcached.guards import call_guarded
from kvcached.policy import DEFAULT_CHUNK_TOKENS
from kvcached.values import UNLIMITED, Bound, BoundReport, Outcome, Update

if TYPE_CHECKING:
    from kvcached.policy import RetentionPolicy

LIFTED_REASON = "the cap is lifted while the engine sleeps, resets its cache or gives its KV memory up"

HELD_REASON = "requests hold {} tokens above the cap, which are taken as they are released"

_log = logging.getLogger(__name__)


class BlockPool(Protocol):
    """What an engine's block pool has to offer to be capped. All sizes are in tokens; counts are O(1).

    A *withheld* block was taken out of the pool by the pool's own calls: no request can get it, and it holds nothing.
    It counts neither as free nor as active nor as idle, but it does count in ``pool_tokens``. Any method may raise:
    the policy notes it, tries again at the next release or update, and serving goes on.
    """

    def pool_tokens(self) -> int:
        """Return how many tokens fit into the pool in all, withheld blocks included. Never changes."""

    def floor_tokens(self) -> int:
        """Return what the pool needs for one request of the greatest length that the engine accepts."""

    def free_tokens(self) -> int:
        """Return how many tokens of blocks are neither used nor cached nor withheld."""

    def withheld_tokens(self) -> int:
        """Return how many tokens of blocks are withheld."""

    def withhold(self, tokens: int) -> int:
        """Take free blocks of at least ``tokens`` tokens out of the pool, or all free ones; return how many tokens.

        Rounds up to whole blocks. Their memory is offered for return (``PoolMemory.offer``) in the same call.
        """

    def restore(self, tokens: int) -> int:
        """Put withheld blocks of at most ``tokens`` tokens back into the pool; return how many tokens.

        Rounds down to whole blocks.
        """


class MemoryProgress(Protocol):
    """The part of ``kvcached.memory.pool_memory.PoolMemory`` that tells whether withheld blocks' memory is back."""

    @property
    def busy(self) -> bool:
        """Whether memory is still on its way back; ends also where it cannot be returned."""


class CapacityPolicy(BoundPolicy):
    """How many tokens of KV this process may hold, and the steps that keep it there.

    Free blocks are taken first, then idle ones are evicted through ``retention``; blocks that requests hold are taken
    as they are released. A pool that is full for the scheduler queues and preempts as it always does.
    """

    def __init__(
        self,
        pool: BlockPool,
        retention: RetentionPolicy,
        memory: MemoryProgress,
        startup_cap_tokens: int = UNLIMITED,
        *,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    ) -> None:
        """Cap ``pool`` at ``startup_cap_tokens`` from the first :meth:`on_step` on, -1 for the whole pool.

        A startup cap below the floor is refused with a warning, and the whole pool is used.
        """
        super().__init__(Update(0, UNLIMITED, Bound.CAP))
        self._pool = pool
        self._retention = retention
        self._memory = memory
        self._chunk_tokens = chunk_tokens
        self._short = False
        self._lifted = False
        if startup_cap_tokens >= 0:
            self._start(Update(0, startup_cap_tokens, Bound.CAP))

    @property
    def cap_tokens(self) -> int:
        """The cap in force, in tokens; -1 is the whole pool."""
        return self._applied.limit_tokens

    @property
    def short(self) -> bool:
        """Whether blocks are missing that requests hold: :meth:`on_release` has something to do."""
        return self._short

    def update(self, update: Update) -> None:
        """Take ``update`` over: store it first, then take or give back the first chunk of blocks.

        A cap below the floor is rejected, and the one in force stays. A cap above the pool is the whole pool.
        """
        refusal = self._below_floor(update)
        if refusal:
            self.reject(update, Outcome.REJECTED_BELOW_FLOOR, refusal)
        else:
            super().update(update)

    def on_release(self) -> None:
        """Take the blocks that a request released, if the cap still lacks some. Call before others can get them."""
        if self._short:
            self._enforce()

    def lift(self) -> None:
        """Give all withheld blocks back at once, for a call of the engine that wants its pool whole.

        Until :meth:`resume`, updates are stored and not enforced.
        """
        self._lifted = True
        self._enforce()

    def resume(self) -> None:
        """Take the blocks out again that :meth:`lift` gave back, beginning with the first chunk."""
        self._lifted = False
        self._enforce()

    def report(self) -> BoundReport:
        """Return the cap in force and what became of the newest publication."""
        return BoundReport(self._applied, self._settled_revision, self._outcome, self._reason)

    def _start(self, startup: Update) -> None:
        refusal = self._below_floor(startup)
        if refusal:
            self._outcome, self._reason = Outcome.REJECTED_BELOW_FLOOR, refusal
            _log.warning("the startup cap %d is not applied: %s", startup.limit_tokens, refusal)
            return
        self._store(startup)
        self._conclude(Outcome.APPLYING, draining=True)

    def _below_floor(self, update: Update) -> str:
        floor = self._pool.floor_tokens()
        if 0 <= update.limit_tokens < floor:
            return f"one longest request needs {floor} tokens; give a cap of at least that"
        return ""

    def _enforce(self) -> None:
        """Move one chunk of blocks towards what the cap wants, and note what came of it."""
        done = call_guarded(self._fail, self._move)
        if done is None:
            return
        missing, moved = done
        self._short = missing > 0
        if missing > 0:
            self._conclude(Outcome.APPLYING, "" if moved else HELD_REASON.format(missing), draining=moved > 0)
        elif moved < 0:
            self._conclude(Outcome.APPLYING, draining=True)
        elif self._lifted:
            self._conclude(Outcome.APPLYING, LIFTED_REASON, draining=False)
        elif self._memory.busy:
            self._conclude(Outcome.APPLYING, draining=True)
        else:
            self._conclude(Outcome.APPLIED, draining=False)

    def _move(self) -> tuple[int, int]:
        """Withhold or restore one chunk; return the tokens still missing, and those moved (restored: below 0)."""
        pool = self._pool
        missing = self._wanted_tokens() - pool.withheld_tokens()
        if missing < 0:
            return 0, -pool.restore(-missing if self._lifted else min(-missing, self._chunk_tokens))
        if missing == 0:
            return 0, 0
        wanted = min(missing, self._chunk_tokens)
        lacking = wanted - pool.free_tokens()
        if lacking > 0:
            self._retention.make_room(lacking)
        moved = pool.withhold(wanted)
        return self._wanted_tokens() - pool.withheld_tokens(), moved

    def _wanted_tokens(self) -> int:
        """Return how many tokens of blocks the cap wants withheld."""
        cap = self._applied.limit_tokens
        if self._lifted or cap < 0:
            return 0
        return max(self._pool.pool_tokens() - cap, 0)

    def _fail(self, error: Exception) -> None:
        self._short = True
        super()._fail(error)
