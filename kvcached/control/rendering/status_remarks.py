"""What an operator should know about a replica beyond its figures, in sentences."""

from __future__ import annotations

from kvcached.control.rendering.text import BAD, BUSY, FAINT, count, limit_text, pair_text, size
from kvcached.printable_text import printable
from kvcached.values import Outcome, kept_tokens

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.ledger.instances import MemberStatus, ReplicaStatus
    from kvcached.values import Update

NAMED_MEMBERS = 3
"""How many members of a group are named; a replica may have 64."""


def newest_desired(replica: ReplicaStatus) -> MemberStatus:
    """Return the member that carries the newest publication."""
    return max(replica.members, key=lambda member: member.revision)


def newest_cap(replica: ReplicaStatus) -> Update:
    """Return the newest published cap."""
    return max((member.cap for member in replica.members), key=lambda cap: cap.revision)


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
    yield from _cap(replica)
    if replica.pool_bytes > 0:
        returns = "" if replica.returns == "yes" else f"; not returned: {printable(replica.returns)}"
        resident, pool = size(replica.resident_bytes), size(replica.pool_bytes)
        yield f"KV memory: {resident} of {pool} resident, {size(replica.returned_bytes)} returned{returns}", FAINT


def _cap(replica: ReplicaStatus) -> Iterator[tuple[str, str]]:
    """Say what there is to say about the cap; nothing where none was ever set."""
    cap, newest = replica.cap, newest_cap(replica)
    if newest.revision == 0 and cap.applied.limit_tokens < 0:
        return
    reason = f": {printable(cap.reason)}" if cap.reason else ""
    if cap.outcome.rejected:
        word = cap.outcome.value.replace("_", " ")
        yield f"cap r{max(newest.revision, cap.settled_revision)} {word}{reason}", BAD
    elif newest.revision > cap.settled_revision and not replica.split:
        yield f"cap {pair_text(newest.revision, newest.limit_tokens)} is published but not applied yet", BUSY
    else:
        applied = pair_text(cap.applied.revision, cap.applied.limit_tokens)
        style = FAINT if cap.outcome in (Outcome.APPLIED, Outcome.STARTUP) else BUSY
        yield f"cap {applied}, {cap.outcome.value}{reason}", style


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
    both = len({member.cap for member in replica.members}) > 1
    for member in replica.members:
        groups.setdefault(_pairs(member, both=both), []).append(printable(member.gpu))
    parts = [f"{pair} in {_names(gpus)}" for pair, gpus in groups.items()]
    if replica.missing_members:
        parts.append(f"{len(replica.missing_members)} member(s) without a usable ledger")
    return f"split: {'; '.join(parts)}; publish again to repair"


def _pairs(member: MemberStatus, *, both: bool) -> str:
    limit = pair_text(member.revision, member.limit_tokens)
    return f"{limit}, cap {pair_text(member.cap.revision, member.cap.limit_tokens)}" if both else limit


def _names(gpus: list[str]) -> str:
    rest = len(gpus) - NAMED_MEMBERS
    return ", ".join(gpus) if rest <= 0 else f"{', '.join(gpus[:NAMED_MEMBERS])} and {rest} more"
