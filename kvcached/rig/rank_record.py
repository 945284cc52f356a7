"""What one rank writes down about a run, for the report and for pictures. It decides nothing."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvcached.values import Outcome, kept_tokens

if TYPE_CHECKING:
    from kvcached.policy import RetentionPolicy
    from kvcached.rig.block_cache import BlockCache
    from kvcached.values import Update

_SAMPLE_NS = 20_000_000


@dataclass(slots=True)
class UpdateRecord:
    """One update on one rank.

    ``latency_us`` runs from rank 0's poll to the limit being stored here and the first chunk of the excess evicted.
    The token counts are those at the end of its last chunk, ``steps`` scheduler steps later in all; ``complete`` is
    false if the next update, an error or the end of the run came first. ``time_s`` counts from the ``ready`` line.
    """

    step: int
    revision: int
    limit_tokens: int
    evicted_tokens: int
    idle_tokens_after: int
    latency_us: float
    steps: int
    complete: bool
    time_s: float


class Recorder:
    """The notes of one rank."""

    def __init__(self, rank: int, policy: RetentionPolicy, cache: BlockCache, *, timeline: bool) -> None:
        """Take notes on ``policy`` and ``cache``; with ``timeline`` also a sample every 20 ms or so."""
        self.start_ns = 0
        """The moment on the monotonic clock from which times in the notes count."""
        self.updates: list[UpdateRecord] = []
        self.rejections: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.max_idle_tokens = 0
        self.breaches = 0
        self._rank = rank
        self._policy = policy
        self._cache = cache
        self._timeline = timeline
        self._sample_due_ns = 0
        self._open: UpdateRecord | None = None
        self._evicted_before = 0

    def before_update(self) -> None:
        """Note where the update begins that is applied next, and close the one it overtakes."""
        self._open = None
        self._evicted_before = self._policy.report().evicted_tokens

    def note_update(self, step: int, update: Update, taken_ns: int) -> None:
        """Note that ``update``, polled at ``taken_ns``, was just applied."""
        now_ns = time.monotonic_ns()
        self._open = UpdateRecord(
            step=step,
            revision=update.revision,
            limit_tokens=update.limit_tokens,
            evicted_tokens=0,
            idle_tokens_after=0,
            latency_us=(now_ns - taken_ns) / 1000,
            steps=1,
            complete=False,
            time_s=(now_ns - self.start_ns) / 1e9,
        )
        self.updates.append(self._open)
        self._follow(self._open)
        self._sample_due_ns = 0

    def note_rejection(self, step: int, update: Update, reason: str) -> None:
        """Note that ``update`` was rejected."""
        self.rejections.append({"step": step, "revision": update.revision, "reason": reason})
        self._sample_due_ns = 0

    def end_step(self, step: int) -> None:
        """Note what holds at the end of a step."""
        # What may last for long is always sampled: the end of an update's eviction, and an engine without requests.
        if self._open is not None or self._cache.active_tokens() == 0:
            self._sample_due_ns = 0
        if self._open is not None:
            self._open.steps = step - self._open.step + 1
            self._follow(self._open)
        idle = self._cache.idle_tokens()
        self.max_idle_tokens = max(self.max_idle_tokens, idle)
        if self._exceeds(idle):
            self.breaches += 1
        if self._timeline:
            self._sample(step)

    def to_dict(self) -> dict[str, Any]:
        """Return the notes, JSON-ready."""
        report = self._policy.report()
        return {
            "rank": self._rank,
            "final_limit_tokens": report.applied.limit_tokens,
            "final_revision": report.applied.revision,
            "final_outcome": report.outcome.value,
            "max_idle_tokens": self.max_idle_tokens,
            "final_idle_tokens": report.idle_tokens,
            "eviction_errors": report.eviction_errors,
            "limit_breaches": self.breaches,
            "updates": [asdict(one) for one in self.updates],
            "rejections": self.rejections,
        }

    def _follow(self, record: UpdateRecord) -> None:
        """Bring the newest update's record up to date until its excess is gone."""
        report = self._policy.report()
        record.evicted_tokens = report.evicted_tokens - self._evicted_before
        record.idle_tokens_after = report.idle_tokens
        if self._policy.draining:
            return
        record.complete = report.outcome is not Outcome.EVICTION_FAILED
        self._open = None

    def _exceeds(self, idle: int) -> bool:
        """Tell whether the limit is exceeded although no eviction is under way and none has failed."""
        kept = kept_tokens(self._policy.limit_tokens, self._cache.block_tokens)
        if kept < 0 or idle <= kept or self._policy.draining:
            return False
        return self._policy.report().outcome is not Outcome.EVICTION_FAILED

    def _sample(self, step: int) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._sample_due_ns:
            return
        self._sample_due_ns = now_ns + _SAMPLE_NS
        report = self._policy.report()
        self.samples.append(
            {
                "t": (now_ns - self.start_ns) / 1e9,
                "rank": self._rank,
                "step": step,
                "revision": report.applied.revision,
                "limit_tokens": report.applied.limit_tokens,
                "idle_tokens": report.idle_tokens,
                "active_tokens": report.active_tokens,
            },
        )
