"""Publishing a limit to all members of an instance.

Every publisher goes through the members in the same order and only ever raises a word, so the files converge to the
newest publication whatever the interleaving. The first member of a replica is the sequencer: winning it makes the
revision belong to this limit.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace

from kvcached import _native
from kvcached.elsewhere import elsewhere
from kvcached.ledger import LedgerDirectory, LedgerDirectoryError
from kvcached.replicas import find_conflict, find_replicas
from kvcached.values import MAX_REVISION, UNLIMITED, Outcome, Update

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from kvcached.replicas import Member, Replica

ACCEPTED = "accepted"
PARTIAL = "partial"
SUPERSEDED = "superseded"
UNAVAILABLE = "unavailable"

PUBLISHED = "published"
FAILED = "failed"

MAX_ATTEMPTS = 10_000
"""How often a publication that meets an equal revision starts over. Each loss is another publisher's success."""

UNKNOWN_GPU = "?"
"""The gpu of a member whose ledger is gone: its id stood nowhere else."""


@dataclass(frozen=True)
class MemberResult:
    """What a publication did to one member. ``revision`` and ``limit_tokens`` are what stands there now."""

    gpu: str
    replica: int
    status: str
    revision: int | None
    limit_tokens: int | None
    error: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "gpu": self.gpu,
            "replica": self.replica,
            "status": self.status,
            "revision": self.revision,
            "limit_tokens": self.limit_tokens,
            "error": self.error,
        }


@dataclass(frozen=True)
class Rejection:
    """A replica that will not apply a publication, and why."""

    replica: int
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"replica": self.replica, "reason": self.reason}


@dataclass(frozen=True)
class PublicationResult:
    """What became of a publication.

    ``status`` is ``accepted``, ``partial``, ``superseded`` or ``unavailable``; accepted means written everywhere, not
    that anything was evicted. ``revision`` is the one this call took, 0 if it wrote nothing. After waiting, ``applied``
    tells whether every replica holds to the limit, ``waited_s`` how many seconds that took, ``rejections`` who will
    not, and ``engine_ended`` that an engine ended or was restarted meanwhile, which drops the publication; without
    waiting they are None, None, empty and False.
    """

    status: str
    instance_name: str
    limit_tokens: int
    revision: int
    gpus: tuple[MemberResult, ...] = ()
    warnings: tuple[str, ...] = ()
    applied: bool | None = None
    waited_s: float | None = None
    rejections: tuple[Rejection, ...] = ()
    engine_ended: bool = False

    @property
    def accepted(self) -> bool:
        """Whether revision and limit stand in every member of every live replica."""
        return self.status == ACCEPTED

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; what concerns waiting is in it only after waiting."""
        fields: dict[str, Any] = {
            "status": self.status,
            "instance_name": self.instance_name,
            "limit_tokens": self.limit_tokens,
            "revision": self.revision,
            "accepted": self.accepted,
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "warnings": list(self.warnings),
        }
        if self.applied is not None:
            fields["applied"] = self.applied
            fields["waited_s"] = self.waited_s
            fields["rejections"] = [rejection.to_dict() for rejection in self.rejections]
        return fields


def publish(
    limit_tokens: int, instance_name: str, ledger_dir: str, *, if_revision: int | None = None, note: str = ""
) -> PublicationResult:
    """Publish a limit, already checked, to an instance. What the outside world does wrong comes back as a result."""
    nothing = PublicationResult(UNAVAILABLE, instance_name, limit_tokens, 0)
    try:
        with LedgerDirectory(ledger_dir, writable=True) as directory:
            return _publish_in(directory, nothing, if_revision, note)
    except LedgerDirectoryError as error:
        return replace(nothing, warnings=(f"{error}{elsewhere(ledger_dir)}",))
    except _native.NativeLibraryError as error:
        return replace(nothing, warnings=(str(error),))


class Addressees:
    """Who a publication goes to, the highest revision among them, and which files could not be used."""

    # No dataclass, nor is the next one: making one costs every start of the command line half a millisecond.
    def __init__(self, replicas: list[Replica], newest: int, refused: tuple[str, ...]) -> None:
        self.replicas = replicas
        self.newest = newest
        self.refused = refused


class Obstacle:
    """Why nothing can be published: the status it leads to, and sentences that say so."""

    def __init__(self, status: str, warnings: tuple[str, ...]) -> None:
        self.status = status
        self.warnings = warnings


def look_up(directory: LedgerDirectory, instance_name: str, if_revision: int | None) -> Addressees | Obstacle:
    """Find the live replicas of an instance, or what stands in the way. Writes nothing."""
    replicas = find_replicas(directory.open_all(), instance_name)
    refused = tuple(f"{refusal.path}: {refusal.reason}" for refusal in directory.refusals)
    if not replicas:
        missing = f"no live instance {instance_name!r} in {directory.path}{elsewhere(directory.path)}"
        return Obstacle(UNAVAILABLE, (missing, *refused))
    conflict = find_conflict(replicas)
    if conflict is not None:
        return Obstacle(UNAVAILABLE, (conflict,))
    newest = max(member.slot.desired.revision for replica in replicas for member in replica.members)
    if if_revision is not None and newest != if_revision:
        return Obstacle(SUPERSEDED, (f"the instance's highest revision is {newest}, not {if_revision}",))
    return Addressees(replicas, newest, refused)


def _publish_in(
    directory: LedgerDirectory, nothing: PublicationResult, if_revision: int | None, note: str
) -> PublicationResult:
    found = look_up(directory, nothing.instance_name, if_revision)
    if isinstance(found, Obstacle):
        written = ": nothing was written" if found.status == SUPERSEDED else ""
        first, *others = found.warnings
        return replace(nothing, status=found.status, warnings=(f"{first}{written}", *others))
    replicas, newest, refused = found.replicas, found.newest, found.refused
    attempt = _publish_to(replicas, nothing.limit_tokens, newest, note=note, may_restart=if_revision is None)
    if attempt is None:
        warning = f"revisions are used up at {MAX_REVISION}: restart the engine, which begins at 0 again"
        return replace(nothing, warnings=(warning,))
    attempt.finish()
    return _result(attempt, nothing, (*advice(replicas, nothing.limit_tokens), *refused))


class _Attempt:
    """One revision on its way through all members."""

    def __init__(self, update: Update, record: _native.AuditRecord) -> None:
        self.update = update
        self._record = record
        self.results: list[MemberResult] = []
        self._written: list[tuple[int, Member]] = []

    def raise_replica(self, replica: Replica) -> int | None:
        """Raise the members in order. Returns a revision to start over above, or None."""
        for position, member in enumerate(replica.members):
            try:
                raised, found = member.ledger.handle.raise_desired(
                    member.index, member.slot.incarnation, self.update, self._record
                )
            except OSError as error:
                self._note(member, FAILED, None, _failure(error))
                continue
            if raised:
                self._written.append((len(self.results), member))
                self._note(member, PUBLISHED, self.update, None)
            elif found.revision == self.update.revision and (position == 0 or found != self.update):
                return found.revision  # another publisher's revision: this limit needs one of its own
            elif found == self.update:
                self._note(member, PUBLISHED, found, None)
            else:
                self._note(member, SUPERSEDED, found, None)
                if position == 0:
                    return found.revision if not self._written else None
        self._note_missing(replica)
        return None

    def _note(self, member: Member, status: str, stands: Update | None, error: str | None) -> None:
        revision, limit = (stands.revision, stands.limit_tokens) if stands else (None, None)
        replica = member.slot.identity.replica
        self.results.append(MemberResult(member.ledger.gpu, replica, status, revision, limit, error))

    def _note_missing(self, replica: Replica) -> None:
        for index in replica.missing:
            error = (
                f"member {index} of {replica.slot.members} has no usable ledger; the engine registers anew by itself"
            )
            self.results.append(MemberResult(UNKNOWN_GPU, replica.slot.identity.replica, FAILED, None, None, error))

    def finish(self) -> None:
        """Ring the doorbells and confirm that what was written still belongs to the engine.

        An engine whose ledger was replaced gives its slots up before it looks at them for the last time, so a slot that
        is still owned here will be seen by it.
        """
        for _, member in self._written:
            member.ledger.handle.ring(_native.PUBLISHED)
        for position, member in self._written:
            error = _lost_since(member)
            if error is not None:
                self.results[position] = replace(self.results[position], status=FAILED, error=error)


def _lost_since(member: Member) -> str | None:
    """Return why what was written to a member may not reach its engine, or None."""
    try:
        owned = member.ledger.handle.is_owned(member.index, member.slot.incarnation)
    except OSError as error:
        return _failure(error)
    if owned and member.ledger.is_current():
        return None
    return "the engine ended, or its ledger was replaced, while publishing; publish again"


def _publish_to(
    replicas: Sequence[Replica], limit_tokens: int, newest: int, *, note: str = "", may_restart: bool
) -> _Attempt | None:
    """Publish under the revision after ``newest``, or a higher one if others take it; None if there is none left."""
    attempt = None
    for _ in range(MAX_ATTEMPTS):
        if newest >= MAX_REVISION:
            return None
        update = Update(newest + 1, limit_tokens)
        attempt = _Attempt(update, _audit_record(update, replicas[0].slot.identity.instance_name, note))
        above = _raise_all(attempt, replicas)
        if above is None:
            return attempt
        if not may_restart:
            attempt.results = [_lost(member, replica) for replica in replicas for member in replica.members]
            return attempt
        newest = max(above, newest)
    return attempt


def _raise_all(attempt: _Attempt, replicas: Sequence[Replica]) -> int | None:
    for replica in replicas:
        above = attempt.raise_replica(replica)
        if above is not None:
            return above
    return None


def _lost(member: Member, replica: Replica) -> MemberResult:
    slot = member.ledger.handle.read_slot(member.index)
    stands = slot.desired if slot else member.slot.desired
    index = replica.slot.identity.replica
    return MemberResult(member.ledger.gpu, index, SUPERSEDED, stands.revision, stands.limit_tokens, None)


def _result(attempt: _Attempt, nothing: PublicationResult, warnings: tuple[str, ...]) -> PublicationResult:
    statuses = {result.status for result in attempt.results}
    if SUPERSEDED in statuses:
        status = SUPERSEDED
    elif statuses == {PUBLISHED}:
        status = ACCEPTED
    elif PUBLISHED in statuses:
        status = PARTIAL
    else:
        status = UNAVAILABLE
    revision = attempt.update.revision if PUBLISHED in statuses else 0
    return replace(nothing, status=status, revision=revision, gpus=tuple(attempt.results), warnings=warnings)


def advice(replicas: Sequence[Replica], limit_tokens: int) -> list[str]:
    """Return what a caller would want to know about this limit and these engines."""
    warnings = []
    for replica in replicas:
        identity, report = replica.slot.identity, replica.slot.report
        name = f"replica {identity.replica}"
        if report.outcome is Outcome.UNSUPPORTED_ENGINE:
            warnings.append(f"{name} will not apply it: {report.reason}")
        if report.outcome is Outcome.REJECTED_PIPELINE_PARALLEL:
            warnings.append(f"{name} applies nothing while pp_size is {identity.pp_size}")
        if 0 < limit_tokens < identity.block_tokens:
            warnings.append(
                f"{name} keeps one block, {identity.block_tokens} tokens, which is more than {limit_tokens}"
            )
        if report.capacity_tokens and limit_tokens > report.capacity_tokens:
            warnings.append(f"{name} holds {report.capacity_tokens} tokens at most, so this limit bounds nothing")
    return warnings


def _failure(error: OSError) -> str:
    if isinstance(error, ProcessLookupError):
        return "the engine ended or registered anew; publish again"
    return f"{error.strerror} (errno {error.errno})"


def _audit_record(update: Update, instance_name: str, note: str) -> _native.AuditRecord:
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    if program == "__main__.py":
        program = "kvcached-control"
    nobody = Update(0, UNLIMITED)
    return _native.AuditRecord(time.time_ns(), nobody, update, os.getuid(), os.getpid(), instance_name, program, note)
