"""Between the native library's structs and values: fills the ones, reads the others.

A struct that was read may hold anything: a peer that may write the file is not trusted with its contents.
"""

from __future__ import annotations

import os

from kvcached.ledger.contents import AuditRecord, FileStatus, Slot
from kvcached.printable_text import printable
from kvcached.values import Bound, BoundReport, Identity, Outcome, Report, pack, unpack

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Value = TypeVar("Value")

BOUND_CODES = {bound: code for code, bound in enumerate(Bound)}
"""The library's KVL_LIMIT and KVL_CAP."""

_OUTCOMES = tuple(Outcome)
_BOUNDS = tuple(Bound)
_OUTCOME_CODES = {outcome: code for code, outcome in enumerate(_OUTCOMES)}


MOST_REMEMBERED = 256
"""Values that were read before, of each kind. With more engines than that, some are made anew."""


class Structs:
    """Makes and reads the structs of one opened library. Any thread may use it."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        """Use these declarations of cffi and the constants of this library."""
        self._ffi = ffi
        self._lib = lib
        self._identities: dict[bytes, Identity] = {}
        self._reports: dict[bytes, Report] = {}

    def file_status(self, raw: Any) -> FileStatus:
        """Return a ``kvl_file``."""
        return FileStatus(raw.device, raw.inode, raw.size, raw.links, raw.uid, raw.gid, raw.mode, raw.format)

    def new_identity(self, identity: Identity, member: int, members: int) -> Any:
        """Return this process's ``kvl_identity`` as one member of a replica."""
        raw = self._ffi.new("struct kvl_identity *")
        raw.instance = identity.instance_name.encode()
        raw.engine = _cut(identity.engine, self._lib.KVL_ENGINE_BYTES)
        raw.version = _cut(identity.engine_version, self._lib.KVL_VERSION_BYTES)
        raw.replica, raw.member, raw.members = identity.replica, member, members
        raw.tp_size, raw.pp_size = identity.tp_size, identity.pp_size
        raw.startup_limit, raw.startup_cap = identity.startup_limit_tokens, identity.startup_cap_tokens
        raw.block_tokens = identity.block_tokens
        raw.pid = os.getpid()
        return raw

    def new_report(self, report: Report) -> Any:
        """Return a ``kvl_report``."""
        raw = self._ffi.new("struct kvl_report *")
        for bound, code in BOUND_CODES.items():
            self._fill_answer(raw.answers[code], report.of(bound))
        raw.idle, raw.active = report.idle_tokens, report.active_tokens
        raw.capacity, raw.evicted = report.capacity_tokens, report.evicted_tokens
        raw.eviction_errors = report.eviction_errors
        raw.token_bytes, raw.pool_bytes = report.token_bytes, report.pool_bytes
        raw.resident_bytes, raw.returned_bytes = report.resident_bytes, report.returned_bytes
        raw.returns = _cut(report.returns, self._lib.KVL_RETURNS_BYTES)
        return raw

    def _fill_answer(self, raw: Any, answer: BoundReport) -> None:
        raw.applied, raw.settled_revision = pack(answer.applied), answer.settled_revision
        raw.outcome = _OUTCOME_CODES[answer.outcome]
        raw.reason = _cut(answer.reason, self._lib.KVL_REASON_BYTES)

    def new_audit(self, record: AuditRecord) -> Any:
        """Return a ``kvl_audit``."""
        raw = self._ffi.new("struct kvl_audit *")
        raw.when_ns, raw.before, raw.after = record.when_ns, pack(record.before), pack(record.after)
        raw.uid, raw.pid, raw.bound = record.uid, record.pid, BOUND_CODES[record.after.bound]
        raw.instance = record.instance_name.encode()
        raw.program = _cut(record.program, self._lib.KVL_PROGRAM_BYTES)
        raw.note = _cut(record.note, self._lib.KVL_NOTE_BYTES)
        return raw

    def slot(self, raw: Any, *, whole: bool) -> Slot:
        """Return a ``kvl_slot``, whose report counts only if it is ``whole``."""
        identity = self._once(self._identities, raw.identity, ("member", "members", "pid"), self._identity)
        return Slot(
            incarnation=raw.incarnation,
            desired=unpack(raw.desired[BOUND_CODES[Bound.LIMIT]]),
            desired_cap=unpack(raw.desired[BOUND_CODES[Bound.CAP]], Bound.CAP),
            registered_ns=raw.registered_ns,
            identity=identity,
            member=raw.identity.member,
            members=raw.identity.members,
            pid=raw.identity.pid,
            report=self._once(self._reports, raw.report, ("reported_ns",), self._report)
            if whole
            else _silent(identity),
            reported_ns=raw.report.reported_ns,
            consistent=whole,
        )

    def _once(self, known: dict[bytes, Value], raw: Any, own: tuple[str, ...], make: Callable[[Any], Value]) -> Value:
        """Return the value of a struct, which all members of a replica share: only their ``own`` fields differ.

        Making it costs ten times as much as finding it, and there may be 64 members.
        """
        kept = [getattr(raw, field) for field in own]
        for field in own:
            setattr(raw, field, 0)
        key = bytes(self._ffi.buffer(self._ffi.addressof(raw)))
        for field, number in zip(own, kept, strict=True):
            setattr(raw, field, number)
        value = known.get(key)
        if value is None:
            if len(known) >= MOST_REMEMBERED:
                known.clear()
            value = known[key] = make(raw)
        return value

    def _identity(self, raw: Any) -> Identity:
        return Identity(
            instance_name=self._text(raw.instance),
            engine=self._text(raw.engine),
            engine_version=self._text(raw.version),
            replica=raw.replica,
            tp_size=raw.tp_size,
            pp_size=raw.pp_size,
            startup_limit_tokens=raw.startup_limit,
            block_tokens=raw.block_tokens,
            startup_cap_tokens=raw.startup_cap,
        )

    def _report(self, raw: Any) -> Report:
        limit = self._answer(raw, Bound.LIMIT)
        return Report(
            applied=limit.applied,
            settled_revision=limit.settled_revision,
            outcome=limit.outcome,
            reason=limit.reason,
            idle_tokens=raw.idle,
            active_tokens=raw.active,
            capacity_tokens=raw.capacity,
            evicted_tokens=raw.evicted,
            eviction_errors=raw.eviction_errors,
            cap=self._answer(raw, Bound.CAP),
            token_bytes=raw.token_bytes,
            pool_bytes=raw.pool_bytes,
            resident_bytes=raw.resident_bytes,
            returned_bytes=raw.returned_bytes,
            returns=self._text(raw.returns),
        )

    def _answer(self, report: Any, bound: Bound) -> BoundReport:
        raw = report.answers[BOUND_CODES[bound]]
        return BoundReport(
            applied=unpack(raw.applied, bound),
            settled_revision=raw.settled_revision,
            # A peer may have written any number.
            outcome=_OUTCOMES[raw.outcome] if raw.outcome < len(_OUTCOMES) else Outcome.STARTUP,
            reason=self._text(raw.reason),
        )

    def audit(self, raw: Any) -> AuditRecord:
        """Return a ``kvl_audit``."""
        bound = _BOUNDS[raw.bound] if raw.bound < len(_BOUNDS) else Bound.LIMIT  # a peer may have written any number
        return AuditRecord(
            when_ns=raw.when_ns,
            before=unpack(raw.before, bound),
            after=unpack(raw.after, bound),
            uid=raw.uid,
            pid=raw.pid,
            instance_name=self._text(raw.instance),
            program=self._text(raw.program),
            note=self._text(raw.note),
        )

    def _text(self, field: Any) -> str:
        """Decode a field that a peer may have filled with anything, also with commands for the reader's terminal."""
        return printable(self._ffi.string(field).decode(errors="replace"))


def _silent(identity: Identity) -> Report:
    """Return the report of an engine that has said nothing yet."""
    limit, cap = (BoundReport(identity.startup(bound), 0, Outcome.STARTUP, "") for bound in Bound)
    return Report(limit.applied, 0, Outcome.STARTUP, "", 0, 0, 0, 0, 0, cap=cap, returns="")


def _cut(text: str, capacity: int) -> bytes:
    """Encode ``text`` for a field of ``capacity`` bytes with its end mark, without leaving half a character.

    A program's name or an engine's message may hold what cannot be encoded, and must not stop a report.
    """
    return text.encode(errors="replace")[: capacity - 1].decode(errors="ignore").encode()
