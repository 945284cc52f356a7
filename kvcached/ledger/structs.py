"""Between the native library's structs and values: fills the ones, reads the others.

A struct that was read may hold anything: a peer that may write the file is not trusted with its contents.
"""

from __future__ import annotations

import os

from kvcached.ledger.contents import AuditRecord, FileStatus, Slot
from kvcached.values import Identity, Outcome, Report, Update, pack, unpack

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from typing import Any

_OUTCOMES = tuple(Outcome)
_OUTCOME_CODES = {outcome: code for code, outcome in enumerate(_OUTCOMES)}


class Structs:
    """Makes and reads the structs of one opened library."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        """Use these declarations of cffi and the constants of this library."""
        self._ffi = ffi
        self._lib = lib

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
        raw.startup_limit, raw.block_tokens = identity.startup_limit_tokens, identity.block_tokens
        raw.pid = os.getpid()
        return raw

    def new_report(self, report: Report) -> Any:
        """Return a ``kvl_report``."""
        raw = self._ffi.new("struct kvl_report *")
        raw.applied, raw.settled_revision = pack(report.applied), report.settled_revision
        raw.outcome = _OUTCOME_CODES[report.outcome]
        raw.idle, raw.active = report.idle_tokens, report.active_tokens
        raw.capacity, raw.evicted = report.capacity_tokens, report.evicted_tokens
        raw.eviction_errors = report.eviction_errors
        raw.reason = _cut(report.reason, self._lib.KVL_REASON_BYTES)
        return raw

    def new_audit(self, record: AuditRecord) -> Any:
        """Return a ``kvl_audit``."""
        raw = self._ffi.new("struct kvl_audit *")
        raw.when_ns, raw.before, raw.after = record.when_ns, pack(record.before), pack(record.after)
        raw.uid, raw.pid = record.uid, record.pid
        raw.instance = record.instance_name.encode()
        raw.program = _cut(record.program, self._lib.KVL_PROGRAM_BYTES)
        raw.note = _cut(record.note, self._lib.KVL_NOTE_BYTES)
        return raw

    def slot(self, raw: Any, *, whole: bool) -> Slot:
        """Return a ``kvl_slot``, whose report counts only if it is ``whole``."""
        return Slot(
            incarnation=raw.incarnation,
            desired=unpack(raw.desired),
            registered_ns=raw.registered_ns,
            identity=self._identity(raw.identity),
            member=raw.identity.member,
            members=raw.identity.members,
            pid=raw.identity.pid,
            report=self._report(raw.report) if whole else _silent(raw.identity.startup_limit),
            reported_ns=raw.report.reported_ns,
            consistent=whole,
        )

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
        )

    def _report(self, raw: Any) -> Report:
        return Report(
            applied=unpack(raw.applied),
            settled_revision=raw.settled_revision,
            # A peer may have written any number.
            outcome=_OUTCOMES[raw.outcome] if raw.outcome < len(_OUTCOMES) else Outcome.STARTUP,
            reason=self._text(raw.reason),
            idle_tokens=raw.idle,
            active_tokens=raw.active,
            capacity_tokens=raw.capacity,
            evicted_tokens=raw.evicted,
            eviction_errors=raw.eviction_errors,
        )

    def audit(self, raw: Any) -> AuditRecord:
        """Return a ``kvl_audit``."""
        return AuditRecord(
            when_ns=raw.when_ns,
            before=unpack(raw.before),
            after=unpack(raw.after),
            uid=raw.uid,
            pid=raw.pid,
            instance_name=self._text(raw.instance),
            program=self._text(raw.program),
            note=self._text(raw.note),
        )

    def _text(self, field: Any) -> str:
        """Decode a field that a peer may have filled with anything, also with commands for the reader's terminal."""
        text = str(self._ffi.string(field).decode(errors="replace"))
        return text if text.isprintable() else "".join(mark if mark.isprintable() else "\ufffd" for mark in text)


def _silent(startup_limit_tokens: int) -> Report:
    """Return the report of an engine that has said nothing yet."""
    return Report(Update(0, startup_limit_tokens), 0, Outcome.STARTUP, "", 0, 0, 0, 0, 0)


def _cut(text: str, capacity: int) -> bytes:
    """Encode ``text`` for a field of ``capacity`` bytes with its end mark, without leaving half a character.

    A program's name or an engine's message may hold what cannot be encoded, and must not stop a report.
    """
    return text.encode(errors="replace")[: capacity - 1].decode(errors="ignore").encode()
