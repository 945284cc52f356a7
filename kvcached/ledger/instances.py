"""The live instances of a ledger directory as users see them: what each was told to keep, and what it keeps."""

from __future__ import annotations

import time

from kvcached.ledger.directory import Fault, LedgerDirectoryError
from kvcached.ledger.snapshot import take_snapshot
from kvcached.light_dataclasses import dataclass
from kvcached.settings import choose_ledger_dir
from kvcached.values import incarnation_text

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Any

    from kvcached.ledger.contents import Slot
    from kvcached.ledger.replicas import Member, Replica
    from kvcached.values import BoundReport, Outcome, Update


@dataclass(frozen=True)
class MemberStatus:
    """What is stored in one member's slot: the *desired* pairs. The limit, and that of ``cap``, is in tokens."""

    gpu: str
    revision: int
    limit_tokens: int
    cap: Update

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "gpu": self.gpu,
            "revision": self.revision,
            "limit_tokens": self.limit_tokens,
            "cap": _pair(self.cap),
        }


def _pair(update: Update) -> dict[str, Any]:
    return {"revision": update.revision, "limit_tokens": update.limit_tokens}


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica as the ledger shows it. Sizes are tokens where their names do not say bytes, ages are seconds.

    ``applied`` is the limit's pair in force; ``settled_revision`` the newest one applied or rejected; ``cap`` has the
    same of the cap. ``split`` tells that the members do not all carry the same pairs, or that some are missing;
    ``report_age_s`` is None before the first report; ``incarnation`` (16 hex digits) is another one after a restart.
    The bytes are those of :class:`kvcached.values.Report`.
    """

    replica: int
    tp_size: int
    pp_size: int
    startup_limit_tokens: int
    block_tokens: int
    applied: Update
    settled_revision: int
    outcome: Outcome
    reason: str
    idle_tokens: int
    active_tokens: int
    capacity_tokens: int
    evicted_tokens: int
    eviction_errors: int
    split: bool
    members: tuple[MemberStatus, ...]
    missing_members: tuple[int, ...]
    report_age_s: float | None
    incarnation: str
    startup_cap_tokens: int
    cap: BoundReport
    token_bytes: int
    pool_bytes: int
    resident_bytes: int
    returned_bytes: int
    returns: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "replica": self.replica,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "startup_limit_tokens": self.startup_limit_tokens,
            "block_tokens": self.block_tokens,
            "applied": _pair(self.applied),
            "settled_revision": self.settled_revision,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "idle_tokens": self.idle_tokens,
            "active_tokens": self.active_tokens,
            "capacity_tokens": self.capacity_tokens,
            "evicted_tokens": self.evicted_tokens,
            "eviction_errors": self.eviction_errors,
            "split": self.split,
            "members": [member.to_dict() for member in self.members],
            "missing_members": list(self.missing_members),
            "report_age_s": self.report_age_s,
            "incarnation": self.incarnation,
            "startup_cap_tokens": self.startup_cap_tokens,
            "cap": {**_pair(self.cap.applied), "outcome": self.cap.outcome.value, "reason": self.cap.reason},
            "token_bytes": self.token_bytes,
            "pool_bytes": self.pool_bytes,
            "resident_bytes": self.resident_bytes,
            "returned_bytes": self.returned_bytes,
            "returns": self.returns,
        }


@dataclass(frozen=True)
class InstanceStatus:
    """One live instance: its name, what serves it, its replicas, and all their incarnations in one."""

    name: str
    engine: str
    engine_version: str
    pid: int
    replicas: tuple[ReplicaStatus, ...]
    incarnation: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "engine": self.engine,
            "engine_version": self.engine_version,
            "pid": self.pid,
            "incarnation": self.incarnation,
            "replicas": [replica.to_dict() for replica in self.replicas],
        }


def get_instances(ledger_dir: str | os.PathLike[str] | None = None) -> tuple[InstanceStatus, ...]:
    """Read the state of all live instances of a ledger directory, and change nothing.

    May be called from any thread of any process that may read the directory. Files that are no ledgers are passed over.

    Raises:
        LedgerDirectoryError: the directory does not exist or cannot be read; or nobody was found, and there are ledgers
            that could not be looked at. An empty tuple means that nobody is there.
        ValueError: a malformed directory.

    """
    snapshot = take_snapshot(choose_ledger_dir(ledger_dir))
    if snapshot.fault is not None:
        raise LedgerDirectoryError(snapshot.reason, snapshot.fault)
    if snapshot.unseen and not snapshot.replicas:
        message = f"no ledger in {snapshot.path} could be read: {'; '.join(snapshot.unseen)}"
        raise LedgerDirectoryError(message, Fault.UNKNOWN)
    return statuses_of(snapshot.replicas)


def statuses_of(replicas: Sequence[Replica]) -> tuple[InstanceStatus, ...]:
    """Return the user's view of replicas that :mod:`kvcached.ledger.snapshot` found."""
    now_ns = time.time_ns()
    by_name: dict[str, list[Replica]] = {}
    for replica in replicas:
        by_name.setdefault(replica.slot.identity.instance_name, []).append(replica)
    return tuple(
        InstanceStatus(
            name=name,
            engine=group[0].slot.identity.engine,
            engine_version=group[0].slot.identity.engine_version,
            pid=group[0].slot.pid,
            replicas=tuple(replica_status(replica, now_ns) for replica in group),
            incarnation=incarnation_text(replica.slot.incarnation for replica in group),
        )
        for name, group in by_name.items()
    )


def replica_status(replica: Replica, now_ns: int) -> ReplicaStatus:
    """Return the user's view of one replica."""
    slot = replica.slot
    identity, report = slot.identity, slot.report
    return ReplicaStatus(
        replica=identity.replica,
        tp_size=identity.tp_size,
        pp_size=identity.pp_size,
        startup_limit_tokens=identity.startup_limit_tokens,
        block_tokens=identity.block_tokens,
        applied=report.applied,
        settled_revision=report.settled_revision,
        outcome=report.outcome,
        reason=report.reason,
        idle_tokens=report.idle_tokens,
        active_tokens=report.active_tokens,
        capacity_tokens=report.capacity_tokens,
        evicted_tokens=report.evicted_tokens,
        eviction_errors=report.eviction_errors,
        split=any(_differs(member.slot, slot) for member in replica.members) or bool(replica.missing),
        members=tuple(map(_member_status, replica.members)),
        missing_members=tuple(replica.missing),
        report_age_s=(now_ns - slot.reported_ns) / 1e9 if slot.reported_ns else None,
        incarnation=incarnation_text([slot.incarnation]),
        startup_cap_tokens=identity.startup_cap_tokens,
        cap=report.cap,
        token_bytes=report.token_bytes,
        pool_bytes=report.pool_bytes,
        resident_bytes=report.resident_bytes,
        returned_bytes=report.returned_bytes,
        returns=report.returns,
    )


def _differs(one: Slot, other: Slot) -> bool:
    return one.desired != other.desired or one.desired_cap != other.desired_cap


def _member_status(member: Member) -> MemberStatus:
    slot = member.slot
    return MemberStatus(member.ledger.gpu, slot.desired.revision, slot.desired.limit_tokens, slot.desired_cap)
