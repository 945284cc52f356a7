"""Publishing a limit or a cap to all members of an instance.

Every publisher goes through the members in the same order and only ever raises a word, so the files converge to the
newest publication whatever the interleaving. The first member of a replica is the sequencer: winning it makes the
revision belong to this limit. What is said of limits holds for caps too: each bound has words and revisions of its
own.
"""

from __future__ import annotations

import os
import time

from kvcached.ledger import binding
from kvcached.ledger.addressees import Addressees, Obstacle, look_up, unusable, warnings_for
from kvcached.ledger.contents import AuditRecord
from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError
from kvcached.ledger.results import MemberResult, MemberResultStatus, PublicationResult, PublicationStatus, Rejection
from kvcached.light_dataclasses import replace
from kvcached.program_name import program_name
from kvcached.values import MAX_REVISION, UNLIMITED, Bound, Update, incarnation_text

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvcached.ledger.replicas import Member, Replica

__all__ = ["SUPERSEDED", "PublicationResult", "Rejection", "publish"]

SUPERSEDED = PublicationStatus.SUPERSEDED

MAX_ATTEMPTS = 10_000
"""How often a publication that meets an equal revision starts over. Each loss is another publisher's success."""

UNKNOWN_GPU = "?"
"""The gpu of a member whose ledger is gone: its id was stored nowhere else."""


def publish(
    limit_tokens: int,
    instance_name: str,
    ledger_dir: str,
    *,
    bound: Bound = Bound.LIMIT,
    if_revision: int | None = None,
    if_incarnation: str | None = None,
    if_different: bool = False,
    note: str = "",
) -> PublicationResult:
    """Publish a limit or cap, already checked. What the outside world does wrong comes back as a result.

    With ``if_revision`` and ``if_incarnation`` only if these are still so; with ``if_different`` only if another limit
    is desired anywhere.
    """
    nothing = PublicationResult(PublicationStatus.UNAVAILABLE, instance_name, limit_tokens, 0, bound=bound)
    try:
        with LedgerDirectory(ledger_dir, writable=True) as directory:
            found = look_up(directory, instance_name, bound, if_revision, if_incarnation)
            if isinstance(found, Obstacle):
                return _hindered(found, nothing)
            nothing = replace(nothing, incarnation=found.incarnation)
            if if_different and found.desire(limit_tokens):
                return _unchanged(found, nothing)
            return _publish_to_found(found, nothing, note, may_restart=if_revision is None)
    except LedgerDirectoryError as error:
        return replace(nothing, warnings=(unusable(ledger_dir, error),))
    except binding.NativeLibraryError as error:
        return replace(nothing, warnings=(str(error),))


def _hindered(obstacle: Obstacle, nothing: PublicationResult) -> PublicationResult:
    if obstacle.status is not PublicationStatus.SUPERSEDED:
        return replace(nothing, status=obstacle.status, warnings=obstacle.warnings)
    return replace(
        nothing,
        status=obstacle.status,
        warnings=(f"{obstacle.warnings[0]}: nothing was written", *obstacle.warnings[1:]),
        gpus=tuple(_untouched(obstacle.replicas, nothing.bound, MemberResultStatus.SUPERSEDED)),
        incarnation=incarnation_text(replica.slot.incarnation for replica in obstacle.replicas),
    )


def _unchanged(found: Addressees, nothing: PublicationResult) -> PublicationResult:
    return replace(
        nothing,
        status=PublicationStatus.ACCEPTED,
        revision=found.newest,
        unchanged=True,
        gpus=tuple(_untouched(found.replicas, nothing.bound, MemberResultStatus.PUBLISHED)),
        warnings=(*warnings_for(found, nothing.limit_tokens), *found.refused),
    )


def _publish_to_found(
    found: Addressees, nothing: PublicationResult, note: str, *, may_restart: bool
) -> PublicationResult:
    attempt = _publish_to(found, nothing.limit_tokens, note=note, may_restart=may_restart)
    if attempt is None:
        warning = f"revision {MAX_REVISION} is the last: restart the engine, which begins at 0 again"
        entries = tuple(_untouched(found.replicas, nothing.bound, MemberResultStatus.FAILED, "no revisions are left"))
        return replace(nothing, warnings=(warning,), gpus=entries)
    attempt.finish()
    warnings = (*warnings_for(found, nothing.limit_tokens), *found.refused)
    return _result(attempt, nothing, warnings)


class _Attempt:
    """One revision on its way through all members."""

    def __init__(self, update: Update, replicas: Sequence[Replica], note: str) -> None:
        self.update = update
        self._replicas = replicas
        self._record = _audit_record(update, replicas[0].slot.identity.instance_name, note)
        self._noted: dict[tuple[str, int], MemberResult] = {}
        self.written: list[Member] = []

    @property
    def results(self) -> list[MemberResult]:
        """One entry for each member. Those that were not reached were overtaken before: what they hold decides."""
        results = []
        for replica in self._replicas:
            bound = self.update.bound
            results += [self._noted.get(_place(member)) or _lost(member, bound) for member in replica.members]
            results += _missing(replica)
        return results

    def raise_replica(self, replica: Replica) -> int | None:
        """Raise the members in order. Returns a revision to start over above, or None.

        Without its first member a replica has nobody to decide whose a revision is: then nothing is written to it.
        """
        if 0 in replica.missing:
            self._note_unwritten(replica.members)
            return None
        for position, member in enumerate(replica.members):
            found = self._raise(member)
            if found is None:
                if position == 0:
                    self._note_unwritten(replica.members[1:])
                    return None
            elif found.revision == self.update.revision and (position == 0 or found != self.update):
                return found.revision  # another publisher's revision: this limit needs one of its own
            elif found.revision < self.update.revision:
                self.written.append(member)
                self._note(member, MemberResultStatus.PUBLISHED, self.update)
            elif found == self.update:
                self._note(member, MemberResultStatus.PUBLISHED, found)
            else:
                self._note(member, MemberResultStatus.SUPERSEDED, found)
                if position == 0:
                    return None if self.written else found.revision
        return None

    def _raise(self, member: Member) -> Update | None:
        """Raise one member: the pair that was replaced or that won, or None after a failure, which is noted."""
        if not member.ledger.writable:
            self._note(member, MemberResultStatus.FAILED, self._seen(member), "read-only for you")
            return None
        try:
            _, found = member.ledger.handle.raise_desired(
                member.index,
                member.slot.incarnation,
                self.update,
                self._record,
                floor=self._seen(member).revision,
            )
        except OSError as error:
            self._note(member, MemberResultStatus.FAILED, None, _failure(error))
            return None
        return found

    def _seen(self, member: Member) -> Update:
        return member.slot.desired_of(self.update.bound)

    def _note_unwritten(self, members: Iterable[Member]) -> None:
        for member in members:
            self._note(member, MemberResultStatus.FAILED, self._seen(member), _NOT_WRITTEN)

    def _note(
        self, member: Member, status: MemberResultStatus, stored: Update | None, error: str | None = None
    ) -> None:
        self._noted[_place(member)] = _entry(member, status, stored, error)

    def finish(self) -> None:
        """Ring the doorbells, and confirm that what was written still belongs to the engine.

        An engine whose ledger was replaced gives its slots up before it looks at them for the last time, so a slot that
        is still owned here will be seen by it.
        """
        for member in self.written:
            member.ledger.handle.ring(binding.PUBLISHED)
        for member in self.written:
            error = _lost_since(member, self.update)
            if error is not None:
                self._noted[_place(member)] = _entry(member, MemberResultStatus.FAILED, self.update, error)


_NOT_WRITTEN = "not written: the replica's first member, which decides who owns the revision, could not be written"


def _lost_since(member: Member, update: Update) -> str | None:
    """Return why what was written to a member may not reach its engine, or None."""
    handle, incarnation = member.ledger.handle, member.slot.incarnation
    try:
        owned = handle.is_owned(member.index, incarnation)
    except OSError as error:
        return _failure(error)
    stored = handle.desired(member.index, incarnation, update.bound)
    # An old copy of the file may have been put back in between.
    kept = stored is not None and (stored == update or stored.revision > update.revision)
    if owned and kept and member.ledger.is_current():
        return None
    return (
        "the engine ended or lost its ledger during publication, but may still apply it; check status, or publish again"
    )


def _place(member: Member) -> tuple[str, int]:
    return member.ledger.gpu, member.index


def _entry(member: Member, status: MemberResultStatus, stored: Update | None, error: str | None = None) -> MemberResult:
    revision, limit = (stored.revision, stored.limit_tokens) if stored else (None, None)
    return MemberResult(member.ledger.gpu, member.slot.identity.replica, status, revision, limit, error)


def _lost(member: Member, bound: Bound) -> MemberResult:
    slot = member.ledger.handle.read_slot(member.index) or member.slot
    return _entry(member, MemberResultStatus.SUPERSEDED, slot.desired_of(bound))


def _missing(replica: Replica) -> list[MemberResult]:
    index_of, members = replica.slot.identity.replica, replica.slot.members
    return [
        MemberResult(UNKNOWN_GPU, index_of, MemberResultStatus.FAILED, None, None, _missing_text(index, members))
        for index in replica.missing
    ]


def _missing_text(index: int, members: int) -> str:
    return f"member {index} of {members} has no usable ledger here; a file that cannot be used is named in the warnings"


def _untouched(
    replicas: Sequence[Replica], bound: Bound, status: MemberResultStatus, error: str | None = None
) -> Iterator[MemberResult]:
    """Yield an entry for each member of a publication that wrote nothing: what is stored there."""
    for replica in replicas:
        yield from (_entry(member, status, member.slot.desired_of(bound), error) for member in replica.members)
        yield from _missing(replica)


def _publish_to(found: Addressees, limit_tokens: int, *, note: str, may_restart: bool) -> _Attempt | None:
    """Publish under the next revision of the bound, or a higher one if others take it; None if there is none left."""
    newest, replicas, attempt = found.newest, found.replicas, None
    for _ in range(MAX_ATTEMPTS):
        if newest >= MAX_REVISION:
            return None
        attempt = _Attempt(Update(newest + 1, limit_tokens, found.bound), replicas, note)
        above = _raise_all(attempt, replicas)
        if above is None or not may_restart:
            return attempt
        newest = max(above, newest)
    return attempt


def _raise_all(attempt: _Attempt, replicas: Sequence[Replica]) -> int | None:
    for replica in replicas:
        above = attempt.raise_replica(replica)
        if above is not None:
            return above
    return None


def _result(attempt: _Attempt, nothing: PublicationResult, warnings: tuple[str, ...]) -> PublicationResult:
    results = tuple(attempt.results)
    statuses = {result.status for result in results}
    revision = attempt.update.revision if attempt.written or MemberResultStatus.PUBLISHED in statuses else 0
    return replace(nothing, status=_status_of(statuses), revision=revision, gpus=results, warnings=warnings)


def _status_of(statuses: set[MemberResultStatus]) -> PublicationStatus:
    if MemberResultStatus.SUPERSEDED in statuses:
        return PublicationStatus.SUPERSEDED
    if statuses == {MemberResultStatus.PUBLISHED}:
        return PublicationStatus.ACCEPTED
    return PublicationStatus.PARTIAL if MemberResultStatus.PUBLISHED in statuses else PublicationStatus.UNAVAILABLE


def _failure(error: OSError) -> str:
    if isinstance(error, ProcessLookupError):
        return "the engine ended or registered again; publish again"
    return f"{error.strerror} (errno {error.errno})"


def _audit_record(update: Update, instance_name: str, note: str) -> AuditRecord:
    nobody, user, process = Update(0, UNLIMITED, update.bound), os.getuid(), os.getpid()
    return AuditRecord(time.time_ns(), nobody, update, user, process, instance_name, program_name(), note)
