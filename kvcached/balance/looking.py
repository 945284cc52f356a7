"""Looking at the engines that share a budget: their slots, their advisors' pages, and who told them what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from kvcached.advisor.page import PageError
from kvcached.advisor.page_file import read_page
from kvcached.balance.engine_look import InstanceLook, PublishedBy, ReplicaLook
from kvcached.ledger.directory import Fault, LedgerDirectory, LedgerDirectoryError
from kvcached.ledger.registration import SlotPlace
from kvcached.ledger.replicas import desired_pairs, find_conflict, newest_revision
from kvcached.ledger.snapshot import look_at
from kvcached.values import UNLIMITED, Bound, Outcome, incarnation_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvcached.ledger.replicas import Replica
    from kvcached.ledger.snapshot import Snapshot

_FURTHEST = (
    Outcome.UNSUPPORTED_ENGINE,
    Outcome.REJECTED_PIPELINE_PARALLEL,
    Outcome.REJECTED_INVALID,
    Outcome.REJECTED_BELOW_FLOOR,
    Outcome.EVICTION_FAILED,
    Outcome.HELD,
    Outcome.APPLYING,
    Outcome.STARTUP,
    Outcome.APPLIED,
)


@dataclass(frozen=True)
class EngineLooks:
    """The instances of one look, by name. ``problem`` says why they cannot be told apart or not all were seen."""

    instances: Mapping[str, InstanceLook]
    problem: str = ""


def look_at_engines(
    ledger_dir: str, patterns: Sequence[str], bound: Bound, knows: Callable[[str, str, int], bool]
) -> EngineLooks:
    """Look at the instances that match one of ``patterns``. Raises :class:`NativeLibraryError` alone.

    ``knows`` tells whether a name, incarnation and revision are one's own publication: of all others the record is
    read. A directory that does not exist has no instances yet.
    """
    try:
        with LedgerDirectory(ledger_dir, writable=False) as directory:
            return _look(directory, look_at(directory), patterns, bound, knows)
    except LedgerDirectoryError as error:
        return EngineLooks({}, "" if error.fault is Fault.ABSENT else str(error))


def _look(
    directory: LedgerDirectory,
    snapshot: Snapshot,
    patterns: Sequence[str],
    bound: Bound,
    knows: Callable[[str, str, int], bool],
) -> EngineLooks:
    names = [name for name in snapshot.names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    found = {name: snapshot.of(name).replicas for name in names}
    conflict = next(filter(None, map(find_conflict, found.values())), None)
    instances = {name: _instance(directory, name, replicas, bound, knows) for name, replicas in found.items()}
    return EngineLooks(instances, conflict or "; ".join(snapshot.unseen))


def _instance(
    directory: LedgerDirectory,
    name: str,
    replicas: Sequence[Replica],
    bound: Bound,
    knows: Callable[[str, str, int], bool],
) -> InstanceLook:
    revision = newest_revision(replicas, bound)
    incarnation = incarnation_text(replica.slot.incarnation for replica in replicas)
    outcomes = {replica.slot.report.of(bound).outcome for replica in replicas}
    known = revision == 0 or knows(name, incarnation, revision)
    return InstanceLook(
        name=name,
        incarnation=incarnation,
        revision=revision,
        gpus=tuple(sorted({member.ledger.gpu for replica in replicas for member in replica.members})),
        bound=bound,
        replicas=tuple(_replica(directory, replica, bound) for replica in replicas),
        outcome=next(outcome for outcome in _FURTHEST if outcome in outcomes),
        problem=next(filter(None, (_problem(replica, bound) for replica in replicas)), ""),
        published_by=None if known else _published_by(name, replicas, bound, revision),
    )


def _replica(directory: LedgerDirectory, replica: Replica, bound: Bound) -> ReplicaLook:
    first, slot = replica.members[0], replica.slot
    report, identity = slot.report, slot.identity
    told = [pair.limit_tokens for pair in desired_pairs([replica], bound)]
    page, problem = None, ""
    try:
        page = read_page(directory, SlotPlace(first.ledger.gpu, first.index, slot.incarnation))
    except PageError as error:
        problem = str(error)
    # An applied cap has its memory back, but for parts of pages at the ends of runs, which are nobody else's either.
    returning = bound is Bound.CAP and report.returns == "yes" and report.cap.outcome is not Outcome.APPLIED
    return ReplicaLook(
        published_tokens=UNLIMITED if min(told) < 0 else max(told),
        applied_tokens=report.of(bound).applied.limit_tokens,
        used_tokens=report.idle_tokens + (report.active_tokens if bound is Bound.CAP else 0),
        active_tokens=report.active_tokens,
        capacity_tokens=report.capacity_tokens,
        startup_tokens=identity.startup(bound).limit_tokens,
        block_tokens=identity.block_tokens,
        token_bytes=report.token_bytes,
        resident_bytes=report.resident_bytes if returning else 0,
        page=page,
        page_problem=problem,
    )


def _problem(replica: Replica, bound: Bound) -> str:
    """Return why a replica cannot be controlled now, or an empty text."""
    answer = replica.slot.report.of(bound)
    if answer.outcome.rejected:
        return f"{answer.outcome.value}: {answer.reason}"
    if replica.missing or len(set(desired_pairs([replica], bound))) > 1:
        return "its members do not all carry the same publication; publish again to repair"
    return ""


def _published_by(name: str, replicas: Sequence[Replica], bound: Bound, revision: int) -> PublishedBy | None:
    """Return who published the revision, by the newest record that any of the instance's ledgers has of it."""
    for ledger in {member.ledger.gpu: member.ledger for replica in replicas for member in replica.members}.values():
        try:
            records = ledger.publications()
        except OSError:
            continue  # it was cut a moment ago: another member's ledger may have the record
        for record in records:
            if (record.instance_name, record.after.bound, record.after.revision) == (name, bound, revision):
                return PublishedBy(record.note, record.uid, record.program)
    return None
