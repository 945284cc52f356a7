"""The plain values that every layer speaks: limits, updates, outcomes, reports.

Nothing here touches a file, an engine or the native library, so any module may import it. All sizes are in tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable

UNLIMITED = -1
"""The limit that bounds nothing."""

MAX_LIMIT_TOKENS = 2**31 - 1
"""The largest limit that a ledger word can carry (32 bits, signed)."""

MAX_REVISION = 2**32 - 1
"""The last revision that a ledger word can carry: 136 years at one a second."""


class Outcome(enum.Enum):
    """What became of the newest publication, as the engine reports it; the value is the text users see in JSON."""

    STARTUP = "startup"
    APPLYING = "applying"
    APPLIED = "applied"
    HELD = "held"
    EVICTION_FAILED = "eviction_failed"
    REJECTED_PIPELINE_PARALLEL = "rejected_pipeline_parallel"
    REJECTED_INVALID = "rejected_invalid"
    UNSUPPORTED_ENGINE = "unsupported_engine"

    @property
    def rejected(self) -> bool:
        """Whether the engine will not apply the publication: waiting for it is pointless."""
        return self in _REJECTIONS


_REJECTIONS = frozenset(
    {Outcome.REJECTED_PIPELINE_PARALLEL, Outcome.REJECTED_INVALID, Outcome.UNSUPPORTED_ENGINE},
)


@dataclass(frozen=True)
class Update:
    """One publication: a revision and the limit that belongs to it.

    Picklable and without behaviour, because it rides an engine's own request broadcast from rank 0 to all ranks.
    """

    revision: int
    limit_tokens: int


def kept_tokens(limit_tokens: int, block_tokens: int) -> int:
    """Return how many idle tokens an engine may keep under a limit: at least a block of a positive one. -1 is any."""
    return max(limit_tokens, block_tokens) if limit_tokens > 0 else max(limit_tokens, UNLIMITED)


def pack(update: Update) -> int:
    """Return the 64-bit ledger word of a pair: revision in the upper half, limit (signed) in the lower."""
    return update.revision << 32 | update.limit_tokens & 0xFFFFFFFF


def unpack(word: int) -> Update:
    """Return the pair that a 64-bit ledger word stands for."""
    limit = word & 0xFFFFFFFF
    return Update(word >> 32, limit - 2**32 if limit >= 2**31 else limit)


def incarnation_text(incarnations: Iterable[int]) -> str:
    """Return what tells an instance, or one replica, from its successors: 16 hex digits, others after a restart.

    An instance of several replicas has all of theirs in it, so that it changes with any of them.
    """
    combined = 0
    for incarnation in incarnations:
        combined ^= incarnation
    return f"{combined:016x}"


@dataclass(frozen=True)
class Identity:
    """Who a replica is; fixed from its registration to its end."""

    instance_name: str
    engine: str
    engine_version: str
    replica: int
    tp_size: int
    pp_size: int
    startup_limit_tokens: int
    block_tokens: int


@dataclass(frozen=True)
class Report:
    """What an engine says of itself: the pair in force, what became of the newest publication, and its figures.

    ``settled_revision`` is the newest revision that was applied or rejected; it runs ahead of ``applied.revision``
    exactly while the newest publication stands rejected.
    """

    applied: Update
    settled_revision: int
    outcome: Outcome
    reason: str
    idle_tokens: int
    active_tokens: int
    capacity_tokens: int
    evicted_tokens: int
    eviction_errors: int


def unsupported_report(reason: str, settled_revision: int = 0) -> Report:
    """Return the report of an engine that applies nothing, for ``reason``: it keeps whatever it likes."""
    return Report(
        applied=Update(0, UNLIMITED),
        settled_revision=settled_revision,
        outcome=Outcome.UNSUPPORTED_ENGINE,
        reason=reason,
        idle_tokens=0,
        active_tokens=0,
        capacity_tokens=0,
        evicted_tokens=0,
        eviction_errors=0,
    )
