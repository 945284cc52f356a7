"""Are the files in the directory usable ledgers, with room for the next engine, and are their instances in order."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kvcached.control.diagnosis.finding import NOTE, OK, PROBLEM, Finding
from kvcached.control.queries.directory_view import view_of
from kvcached.control.rendering.status_remarks import newest_desired, remarks_of
from kvcached.control.rendering.text import BAD, BUSY, FAINT, limit_text
from kvcached.ledger.directory import ADVICE_SUFFIX, SUFFIX, Fault
from kvcached.ledger.snapshot import look_again, open_snapshot
from kvcached.printable_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.control.queries.directory_view import View
    from kvcached.ledger.directory import Refusal
    from kvcached.ledger.instances import InstanceStatus
    from kvcached.ledger.snapshot import Snapshot

_OURS = (SUFFIX, ADVICE_SUFFIX, ".new")

_LEVELS = {BAD: PROBLEM, BUSY: NOTE, FAINT: OK}
"""What a remark of ``status`` is here, by the weight that it has there."""

FILE = "ledger file"
SETTLE_S = 1.0
"""How long an engine may take to settle a publication that was just made before it counts as deaf."""


def check_ledgers(path: str) -> Iterator[Finding]:
    """Check files and instances; yields nothing if the directory cannot even be read, which is a finding elsewhere."""
    # For writing, so that what a publisher would refuse is refused here; else at least for reading.
    for writable in (True, False):
        with open_snapshot(path, writable=writable) as snapshot:
            if snapshot.fault is None:
                yield from _check(snapshot)
                return


def _check(snapshot: Snapshot) -> Iterator[Finding]:
    yield from _check_files(snapshot)
    yield from _check_strangers(snapshot.path)
    view = view_of(snapshot)
    if any(_is_behind(instance) for instance in view.instances):
        time.sleep(SETTLE_S)
        view = view_of(look_again(snapshot.path, snapshot.files))
    yield from _check_instances(view, snapshot)


def _check_files(snapshot: Snapshot) -> Iterator[Finding]:
    for refusal in snapshot.refusals:
        yield Finding(PROBLEM, FILE, f"{refusal.path}: {refusal.reason}", _remedy(refusal))
    for look in snapshot.read_only:
        text = f"{look.path} is read-only for you: {look.reason}; its engines can be read from here, but not set"
        yield Finding(NOTE, FILE, text, "to publish, run as a user with write permission, on a writable mount")
    live = dead = 0
    for look in snapshot.files:
        if look.ledger is None:
            continue
        indices = {member.index for member in look.members}
        live += len(indices)
        dead += look.ledger.count_ended(indices)
        if len(indices) == look.ledger.slots:
            text = f"{look.path} is full: all {len(indices)} slots belong to live engines"
            yield Finding(PROBLEM, FILE, text, "stop some engines, or give new ones another ledger directory")
    count = len(snapshot.ledgers)
    if count:
        text = f"{count} valid; slots: {live} live, {dead} left by engines that ended (reused automatically)"
        yield Finding(OK, "ledger files", text)
    elif not snapshot.files:
        yield Finding(NOTE, "ledger files", "none yet; engines create them when they register")


def _remedy(refusal: Refusal) -> str:
    """Return what to do about a file that is refused. What may be a healthy engine's is never told to be removed."""
    if refusal.fault is Fault.UNTRUSTED:
        return ""  # the reason says it
    return _REMEDIES.get(refusal.fault, "find out why; engines that use it may be healthy")


_REMEDIES = {
    Fault.DAMAGED: "its engine creates a new one within seconds; if this one is still here then, remove it",
    Fault.NO_LEDGER: "remove it, or move it elsewhere; engines create a new one in its place",
    Fault.OTHER_VERSION: "use the release that its engines use; remove it only after they have stopped",
    Fault.FORBIDDEN: "run as a user who can read it; a healthy engine may be using it",
    Fault.ILLEGAL_NAME: "find out who writes here; this entry is ignored",
}


def _check_strangers(path: str) -> Iterator[Finding]:
    try:
        names = os.listdir(path)
    except OSError:
        return
    strangers = sorted(printable(name) for name in names if not name.endswith(_OURS))
    if strangers:
        yield Finding(NOTE, "ledger directory", f"holds other files, which are ignored: {', '.join(strangers[:5])}")


def _is_behind(instance: InstanceStatus) -> bool:
    return any(newest_desired(replica).revision > replica.settled_revision for replica in instance.replicas)


def _check_instances(view: View, snapshot: Snapshot) -> Iterator[Finding]:
    if view.conflict:
        yield Finding(PROBLEM, "instances", view.conflict)
    if not view.instances and snapshot.unseen:
        yield Finding(NOTE, "instances", "none found, but some files could not be read")
    elif not view.instances:
        yield Finding(NOTE, "instances", "no live instance here")
    for instance in view.instances:
        for replica in instance.replicas:
            subject = f"{printable(instance.name)}/{replica.replica}"
            remarks = list(remarks_of(replica))
            for text, style in remarks:
                deaf = "published but not applied yet" in text
                level = PROBLEM if deaf else _LEVELS[style]
                yield Finding(level, subject, text, "see the engine's log; is its scheduler stopped?" if deaf else "")
            if all(_LEVELS[style] is OK for _, style in remarks):
                kind = f"{printable(instance.engine)} {printable(instance.engine_version)}, pid {instance.pid}"
                applied = f"r{replica.applied.revision} {limit_text(replica.applied.limit_tokens)}"
                yield Finding(OK, subject, f"{kind}, {len(replica.members)} member(s), applies {applied}")
