"""The plain values that every layer speaks: bounds, updates, outcomes, reports.

Nothing here touches a file, an engine or the native library, so any module may import it. All sizes are in tokens.
"""

from __future__ import annotations

import enum

from kvcached.light_dataclasses import dataclass

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable

UNLIMITED = -1
"""The limit that bounds nothing."""

MAX_LIMIT_TOKENS = 2**31 - 1
"""The largest limit that a ledger word can carry (32 bits, signed)."""

MAX_REVISION = 2**32 - 1
"""The last revision that a ledger word can carry: 136 years at one a second."""


class TextEnum(str, enum.Enum):
    """Values that are equal to their text, which is also what messages and JSON show."""

    def __str__(self) -> str:
        return str(self.value)


class Bound(enum.Enum):
    """What a publication bounds: each slot carries a desired word for either, and each has revisions of its own.

    The *limit* bounds idle tokens, the *cap* all tokens of KV, in use and idle.
    """

    LIMIT = "limit"
    CAP = "cap"


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
    REJECTED_BELOW_FLOOR = "rejected_below_floor"

    @property
    def rejected(self) -> bool:
        """Whether the engine will not apply the publication: waiting for it is pointless."""
        return self in _REJECTIONS


_REJECTIONS = frozenset(
    {
        Outcome.REJECTED_PIPELINE_PARALLEL,
        Outcome.REJECTED_INVALID,
        Outcome.UNSUPPORTED_ENGINE,
        Outcome.REJECTED_BELOW_FLOOR,
    },
)


@dataclass(frozen=True)
class Update:
    """One publication: what it bounds, a revision, and the tokens that belong to it.

    Picklable and without behaviour, because it rides an engine's own request broadcast from rank 0 to all ranks.
    Revisions of the two bounds have nothing to do with each other.
    """

    revision: int
    limit_tokens: int
    bound: Bound = Bound.LIMIT


def kept_tokens(limit_tokens: int, block_tokens: int) -> int:
    """Return how many idle tokens an engine may keep under a limit: at least a block of a positive one. -1 is any."""
    return max(limit_tokens, block_tokens) if limit_tokens > 0 else max(limit_tokens, UNLIMITED)


def pack(update: Update) -> int:
    """Return the 64-bit ledger word of a pair: revision in the upper half, tokens (signed) in the lower."""
    return update.revision << 32 | update.limit_tokens & 0xFFFFFFFF


def unpack(word: int, bound: Bound = Bound.LIMIT) -> Update:
    """Return the pair that a 64-bit ledger word of ``bound`` says."""
    limit = word & 0xFFFFFFFF
    return Update(word >> 32, limit - 2**32 if limit >= 2**31 else limit, bound)


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
    startup_cap_tokens: int = UNLIMITED

    def startup(self, bound: Bound) -> Update:
        """Return the pair that is in force until the first publication of ``bound``."""
        tokens = self.startup_cap_tokens if bound is Bound.CAP else self.startup_limit_tokens
        return Update(0, tokens, bound)


@dataclass(frozen=True)
class BoundReport:
    """What an engine says of one bound: the pair in force, and what became of the newest publication.

    ``settled_revision`` is the newest revision that was applied or rejected; it runs ahead of ``applied.revision``
    exactly while the newest publication is rejected.
    """

    applied: Update
    settled_revision: int
    outcome: Outcome
    reason: str


NO_CAP_REASON = "this release of the plugin does not limit KV capacity"
NO_RETURNS_REASON = "this release of the plugin returns no memory"


def no_cap(reason: str) -> BoundReport:
    """Return what an engine whose pool cannot be capped, for ``reason``, says of its cap."""
    return BoundReport(Update(0, UNLIMITED, Bound.CAP), 0, Outcome.UNSUPPORTED_ENGINE, reason)


NO_CAP = no_cap(NO_CAP_REASON)
"""The cap's report of an engine that knows no cap: it is never handed one, and who publishes one is told."""


@dataclass(frozen=True)
class Report:
    """What an engine says of itself: what holds and what became of the newest publication, and its figures.

    ``applied``, ``settled_revision``, ``outcome`` and ``reason`` are those of the limit; ``cap`` has the cap's.
    ``token_bytes`` is what one token of KV takes over all ranks, 0 where the engine cannot say. ``pool_bytes`` is the
    KV memory of all ranks, of which ``resident_bytes`` hold memory now and ``returned_bytes`` are back with the
    operating system or the device's driver; ``returns`` is ``yes``, or why memory is not returned.
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
    cap: BoundReport = NO_CAP
    token_bytes: int = 0
    pool_bytes: int = 0
    resident_bytes: int = 0
    returned_bytes: int = 0
    returns: str = NO_RETURNS_REASON

    def of(self, bound: Bound) -> BoundReport:
        """Return what is said of ``bound``."""
        if bound is Bound.CAP:
            return self.cap
        return BoundReport(self.applied, self.settled_revision, self.outcome, self.reason)


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
        cap=no_cap(reason),
        returns=reason,
    )
