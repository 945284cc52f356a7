"""Are the files in the directory usable ledgers, with room for the next engine, and are their instances in order."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kvcached.control.diagnosis.finding import NOTE, OK, PROBLEM, Finding
from kvcached.control.remarks import newest_desired, remarks_of
from kvcached.control.text import BUSY, limit_text, printable
from kvcached.control.view import read_view
from kvcached.ledger import ADVICE_SUFFIX, SUFFIX, LedgerDirectory, LedgerDirectoryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcached.control.view import View
    from kvcached.instances import InstanceStatus
    from kvcached.ledger import Ledger

_OURS = (SUFFIX, ADVICE_SUFFIX, ".new")

SLOTS = 64
SETTLE_S = 1.0
"""How long an engine may take to settle a publication that was just made before it counts as deaf."""


def check_ledgers(path: str) -> Iterator[Finding]:
    """Check files and instances; yields nothing if the directory cannot even be read, which is a finding elsewhere."""
    try:
        directory = _open(path)
    except LedgerDirectoryError:
        return
    with directory:
        ledgers = directory.open_all()
        yield from _check_files(directory, ledgers)
        view = read_view(directory, ledgers, None)
        if any(_is_behind(instance) for instance in view.instances):
            time.sleep(SETTLE_S)
            view = read_view(directory, ledgers, None)
        yield from _check_instances(view)


def _open(path: str) -> LedgerDirectory:
    """Open for writing, so that what a publisher would refuse is refused here; else at least for reading."""
    try:
        return LedgerDirectory(path, writable=True)
    except LedgerDirectoryError:
        return LedgerDirectory(path, writable=False)


def _check_files(directory: LedgerDirectory, ledgers: Sequence[Ledger]) -> Iterator[Finding]:
    for refusal in directory.refusals:
        remedy = "" if "remove" in refusal.reason else "stop what uses it and remove it; engines make a new one"
        yield Finding(PROBLEM, "ledger file", f"{refusal.path}: {printable(refusal.reason)}", remedy)
    live = dead = 0
    for ledger in ledgers:
        indices = {index for index, _ in ledger.handle.live_slots()}
        live += len(indices)
        # An owner writes its startup limit into the word, so one that is not zero was owned before.
        dead += sum(1 for index in range(SLOTS) if index not in indices and not ledger.handle.is_blank(index))
        if len(indices) == SLOTS:
            text = f"{ledger.path} is full: all {SLOTS} slots belong to live engines"
            yield Finding(PROBLEM, "ledger file", text, "stop some engines, or give new ones another ledger directory")
    if ledgers:
        text = f"{len(ledgers)} valid; slots: {live} live, {dead} left by engines that ended (reused by themselves)"
        yield Finding(OK, "ledger files", text)
    elif not directory.refusals:
        yield Finding(NOTE, "ledger files", "none yet; an engine makes them when it registers")
    yield from _check_strangers(directory.path)


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


def _check_instances(view: View) -> Iterator[Finding]:
    if view.conflict:
        yield Finding(PROBLEM, "instances", view.conflict)
    if not view.instances:
        yield Finding(NOTE, "instances", "none is alive here")
    for instance in view.instances:
        for replica in instance.replicas:
            subject = f"{printable(instance.name)}/{replica.replica}"
            remarks = list(remarks_of(replica))
            for text, style in remarks:
                deaf = "published and not taken over" in text
                level = NOTE if style == BUSY and not deaf else PROBLEM
                yield Finding(level, subject, text, "see the engine's log; is its scheduler stopped?" if deaf else "")
            if not remarks:
                kind = f"{printable(instance.engine)} {printable(instance.engine_version)}, pid {instance.pid}"
                holds = f"r{replica.applied.revision} {limit_text(replica.applied.limit_tokens)}"
                yield Finding(OK, subject, f"{kind}, {len(replica.members)} member(s), holds to {holds}")
