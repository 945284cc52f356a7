"""Who a publication goes to, and what speaks against it. Nothing here writes."""

from __future__ import annotations

from kvcached.ledger.directory import Fault
from kvcached.ledger.not_found import not_found_message
from kvcached.ledger.replicas import desired_pairs, find_conflict, newest_revision
from kvcached.ledger.results import PublicationStatus
from kvcached.ledger.snapshot import Snapshot, look_at, unwritable
from kvcached.light_dataclasses import dataclass
from kvcached.values import Bound, Outcome, incarnation_text, kept_tokens

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError
    from kvcached.ledger.replicas import Replica


@dataclass(frozen=True)
class Addressees:
    """Who a publication of ``bound`` goes to, its highest revision among them, and which files could not be used."""

    replicas: Sequence[Replica]
    bound: Bound
    newest: int
    refused: tuple[str, ...]

    @property
    def incarnation(self) -> str:
        """What tells this instance from its successors."""
        return incarnation_text(replica.slot.incarnation for replica in self.replicas)

    def desire(self, limit_tokens: int) -> bool:
        """Return whether all members of all replicas are there and are told this limit already, by one publication."""
        told = set(desired_pairs(self.replicas, self.bound))
        missing = any(replica.missing for replica in self.replicas)
        return not missing and len(told) == 1 and told.pop().limit_tokens == limit_tokens


@dataclass(frozen=True)
class Obstacle:
    """Why nothing can be published: the status it leads to, sentences that say so, and who is not written to."""

    status: PublicationStatus
    warnings: tuple[str, ...]
    replicas: Sequence[Replica] = ()


def look_up(
    directory: LedgerDirectory,
    instance_name: str,
    bound: Bound,
    if_revision: int | None,
    if_incarnation: str | None = None,
) -> Addressees | Obstacle:
    """Find the live replicas of an instance, or what prevents publishing. Writes nothing."""
    snapshot = look_at(directory)
    blind = _blind(snapshot)
    if blind:
        return Obstacle(PublicationStatus.UNAVAILABLE, (blind,))
    replicas = snapshot.of(instance_name).replicas
    refused = tuple(f"{refusal.path}: {refusal.reason}" for refusal in snapshot.refusals)
    if not replicas:
        missing = not_found_message(snapshot, instance_name)
        return Obstacle(PublicationStatus.UNAVAILABLE, (missing, *(text for text in refused if text not in missing)))
    conflict = find_conflict(replicas)
    if conflict is not None:
        return Obstacle(PublicationStatus.UNAVAILABLE, (conflict,))
    newest = newest_revision(replicas, bound)
    unwritables = (text for replica in replicas for text in unwritable(replica, snapshot))
    found = Addressees(replicas, bound, newest, (*refused, *unwritables))
    unmet = _unmet(found, if_revision, if_incarnation)
    return Obstacle(PublicationStatus.SUPERSEDED, (unmet,), replicas) if unmet else found


def unusable(ledger_dir: str, error: LedgerDirectoryError) -> str:
    """Return a sentence about a directory that could not be opened, and what there is instead."""
    return not_found_message(Snapshot(ledger_dir, reason=str(error), fault=error.fault))


def _blind(snapshot: Snapshot) -> str:
    """Return why this process sees too little to publish anything, or an empty text.

    Where it lacks descriptors or memory, what it does not see may be a member of the instance.
    """
    if snapshot.fault is not None:
        return snapshot.reason
    short = (f"{look.path}: {look.reason}" for look in snapshot.files if look.fault is Fault.SHORTAGE)
    return next(short, "")


def _unmet(found: Addressees, if_revision: int | None, if_incarnation: str | None) -> str:
    """Return which condition does not hold, or an empty text."""
    if if_incarnation is not None and found.incarnation != if_incarnation.lower():
        return f"the instance was restarted or registered again (it is {found.incarnation}, not {if_incarnation})"
    if if_revision is not None and found.newest != if_revision:
        kind = "" if found.bound is Bound.LIMIT else f" of the {found.bound.value}"
        return f"the instance's highest revision{kind} is {found.newest}, not {if_revision}"
    return ""


def warnings_for(found: Addressees, tokens: int) -> list[str]:
    """Return what a caller would want to know about this limit or cap and these engines."""
    return [
        f"replica {replica.slot.identity.replica} {text}"
        for replica in found.replicas
        for text in _warnings_of(replica, tokens, found.bound)
    ]


def _warnings_of(replica: Replica, tokens: int, bound: Bound) -> Iterator[str]:
    identity, report = replica.slot.identity, replica.slot.report
    answer = report.of(bound)
    if answer.outcome is Outcome.UNSUPPORTED_ENGINE:
        yield f"will not apply it: {answer.reason}"
    if answer.outcome is Outcome.REJECTED_PIPELINE_PARALLEL:
        yield f"applies nothing while pp_size is {identity.pp_size}"
    if bound is Bound.LIMIT and kept_tokens(tokens, identity.block_tokens) > tokens:
        yield f"keeps one block, {identity.block_tokens} tokens, which is more than {tokens}"
    if report.capacity_tokens and tokens > report.capacity_tokens:
        yield f"holds {report.capacity_tokens} tokens at most, so this {bound.value} has no effect"
