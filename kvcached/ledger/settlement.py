"""What was published to a replica, and what of it is settled: read from its registration, and reported into it."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached.ledger.resumption import resume_from
from kvcached.values import UNLIMITED, Outcome, Report, Update

if TYPE_CHECKING:
    from kvcached.ledger.registration import Registration

_log = logging.getLogger("kvcached.ledger.subscription")  # one name for all that a subscription says


class Settlement:
    """The pairs and the report of one replica, and the registration, if any, in which publishers find them.

    All methods may be called by any thread.
    """

    def __init__(self, startup_limit_tokens: int) -> None:
        """Begin with nothing published and no registration."""
        self.unsettled: Update | None = None  # set where the ledger is read, cleared when settled; read without a lock
        self.taken = Update(0, startup_limit_tokens)  # the newest pair that all members carried
        self.registration: Registration | None = None
        self.registered = threading.Event()  # set while there is a registration, and for good once closed
        self.in_use = threading.Lock()  # held while wait uses a registration: nobody closes it meanwhile
        self._startup_limit_tokens = startup_limit_tokens
        self._settled_revision = 0
        self._rejected = Update(0, 0)
        self._report: Report | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards all of the above but what is read alone

    def look(self, registration: Registration) -> bool:
        """Read the ledger, unless the registration was replaced; return whether something is unsettled."""
        with self._lock:
            if registration is self.registration:
                update = registration.agreed()
                if update is not None and update.revision > self.taken.revision:
                    self._take(update)
            return self.unsettled is not None

    def acknowledge(self, report: Report) -> None:
        """Take ``report`` for the replica's, settle what it covers, and write it if it differs from the last one."""
        with self._lock:
            self._settled_revision = max(self._settled_revision, report.settled_revision)
            if self.unsettled is not None and self.unsettled.revision <= self._settled_revision:
                self.unsettled = None
            if self._rejected.revision > report.settled_revision:
                report = _as_invalid(report, self._rejected)
            if report != self._report:
                before, self._report = self._report, report
                self._write()
                if report.applied.revision > (before.applied.revision if before is not None else 0):
                    _log_applied(report)

    def adopt(self, registration: Registration) -> bool:
        """Use a registration that was made with ``taken``; False once closed: the caller keeps it."""
        with self._lock:
            if self._closed:
                return False
            self.registration = registration
            self._write()
            self.registered.set()
            return True

    def retire(self, registration: Registration) -> bool:
        """Give up slots that publishers cannot reach, without losing what was published into them; False if closed."""
        with self._lock:
            if self.registration is not registration:
                return False
            self.registration = None
            self.registered.clear()
            # Publishers confirm after writing that the slot is still owned. Looking once more after giving it up means
            # that whatever was confirmed is seen here.
            registration.unregister()
            before, after = self.taken, resume_from(registration.words(), self.taken, self._limit_in_force())
            if after != before:
                self._take(after)
            return True

    def close(self) -> Registration | None:
        """Give the slots up for good; return the registration, which the caller disposes of."""
        with self._lock:
            self._closed = True
            self.registered.set()  # whoever waits for a registration
            registration, self.registration = self.registration, None
            if registration is not None:
                registration.unregister()
            return registration

    def dispose(self, registration: Registration) -> None:
        """Close a registration that was given up, once nobody sleeps in it."""
        with self.in_use:
            registration.close()

    def _take(self, update: Update) -> None:
        self.taken = update
        if update.limit_tokens >= UNLIMITED:
            self.unsettled = update
        else:
            self.unsettled = None
            self._reject_invalid(update)

    def _reject_invalid(self, update: Update) -> None:
        """Settle a word that makes no sense, which only a broken or hostile publisher writes."""
        _log.warning("revision %d has the invalid limit %d: not applied", update.revision, update.limit_tokens)
        self._rejected = update
        self._settled_revision = max(self._settled_revision, update.revision)
        if self._report is not None:
            self._report = _as_invalid(self._report, update)
            self._write()

    def _write(self) -> None:
        if self.registration is None or self._report is None:
            return
        try:
            self.registration.acknowledge(self._report)
        except OSError as error:  # in a forked child, which owns nothing, or into a ledger that is lost
            _log.debug("report not written: %s", error)

    def _limit_in_force(self) -> int:
        if self.unsettled is not None:
            return self.unsettled.limit_tokens  # on its way to the engine
        return self._startup_limit_tokens if self._report is None else self._report.applied.limit_tokens


def _log_applied(report: Report) -> None:
    """Leave one line per applied update; the policy leaves one per rejected update."""
    limit = report.applied.limit_tokens
    held = "no limit" if limit < 0 else f"limit {limit} tokens"
    _log.info("revision %d applied: %s, %d idle", report.applied.revision, held, report.idle_tokens)


def _as_invalid(report: Report, update: Update) -> Report:
    return replace(
        report,
        settled_revision=update.revision,
        outcome=Outcome.REJECTED_INVALID,
        reason=f"revision {update.revision} has the invalid limit {update.limit_tokens}",
    )
