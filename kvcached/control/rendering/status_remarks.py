"""What an operator should know about a replica beyond its figures, in sentences."""

from __future__ import annotations

from kvcached.control.rendering.text import BAD, BUSY, count, limit_text, pair_text
from kvcached.printable_text import printable
from kvcached.values import Outcome, kept_tokens

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.ledger.instances import MemberStatus, ReplicaStatus

NAMED_MEMBERS = 3
"""How many members of a group are named; a replica may have 64."""


def newest_desired(replica: ReplicaStatus) -> MemberStatus:
    """Return the member that carries the newest publication."""
    return max(replica.members, key=lambda member: member.revision)


def outcome_word(replica: ReplicaStatus) -> str:
    """Return the outcome as a short word; the reason is a remark."""
    if replica.outcome in (Outcome.REJECTED_PIPELINE_PARALLEL, Outcome.REJECTED_INVALID):
        return "rejected"
    if replica.outcome is Outcome.UNSUPPORTED_ENGINE:
        return "unsupported"
    return "evict failed" if replica.outcome is Outcome.EVICTION_FAILED else str(replica.outcome.value)


def remarks_of(replica: ReplicaStatus) -> Iterator[tuple[str, str]]:
    """Return sentences with the style that their weight asks for; none for a replica in order."""
    if replica.split:
        yield _split(replica), BAD
    yield from _outcome(replica)
    behind = newest_desired(replica)
    takes = not replica.split and replica.outcome is not Outcome.UNSUPPORTED_ENGINE
    if behind.revision > replica.settled_revision and takes:
        yield f"{pair_text(behind.revision, behind.limit_tokens)} is published but not applied yet", BUSY
    limit = replica.applied.limit_tokens
    if kept_tokens(limit, replica.block_tokens) > limit:
        yield f"keeps one block of {replica.block_tokens} tokens, more than the limit of {limit}", BUSY


def _outcome(replica: ReplicaStatus) -> Iterator[tuple[str, str]]:
    reason = printable(replica.reason) or "no reason given"
    limit = limit_text(replica.applied.limit_tokens)
    kept = kept_tokens(replica.applied.limit_tokens, replica.block_tokens)
    excess = replica.idle_tokens - kept if kept >= 0 else 0
    if replica.outcome is Outcome.UNSUPPORTED_ENGINE:
        yield f"not controlled: {reason}", BAD
    elif replica.outcome.rejected:
        yield f"r{replica.settled_revision} rejected, {limit} stays in force: {reason}", BAD
    elif replica.outcome is Outcome.EVICTION_FAILED:
        yield f"eviction failed {replica.eviction_errors} time(s), tried again at the next release: {reason}", BAD
    elif replica.outcome is Outcome.HELD and excess > 0:
        yield (
            f"{count(excess)} tokens above the limit cannot be evicted now; they will be once they are released",
            BUSY,
        )


def _split(replica: ReplicaStatus) -> str:
    groups: dict[str, list[str]] = {}
    for member in replica.members:
        groups.setdefault(pair_text(member.revision, member.limit_tokens), []).append(printable(member.gpu))
    parts = [f"{pair} in {_names(gpus)}" for pair, gpus in groups.items()]
    if replica.missing_members:
        parts.append(f"{len(replica.missing_members)} member(s) without a usable ledger")
    return f"split: {'; '.join(parts)}; publish again to repair"


def _names(gpus: list[str]) -> str:
    rest = len(gpus) - NAMED_MEMBERS
    return ", ".join(gpus) if rest <= 0 else f"{', '.join(gpus[:NAMED_MEMBERS])} and {rest} more"
