"""What was published to a replica, and what of it is settled: read from its registration, and reported into it."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached.ledger.bound_settlement import BoundSettlement
from kvcached.ledger.registration import Beginning
from kvcached.values import Bound, Identity, Report, Update

if TYPE_CHECKING:
    from kvcached.ledger.registration import Registration

_log = logging.getLogger("kvcached.ledger.subscription")  # one name for all that a subscription says


class Settlement:
    """The pairs and the report of one replica, and the registration, if any, in which publishers find them.

    All methods may be called by any thread.
    """

    def __init__(self, identity: Identity) -> None:
        """Begin with nothing published and no registration."""
        self.unsettled: Update | None = None  # set where the ledger is read, cleared when settled; read without a lock
        self.registration: Registration | None = None
        self.registered = threading.Event()  # set while there is a registration, and for good once closed
        self.in_use = threading.Lock()  # held while wait uses a registration: nobody closes it meanwhile
        self._bounds = {bound: BoundSettlement(identity.startup(bound)) for bound in Bound}
        self._report: Report | None = None  # as the engine made it
        self._written: Report | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards all of the above but what is read alone

    def look(self, registration: Registration) -> bool:
        """Read the ledger, unless the registration was replaced; return whether something is unsettled."""
        with self._lock:
            if registration is self.registration:
                newer = [one for bound, one in self._bounds.items() if one.offer(registration.agreed(bound))]
                if newer:
                    self._taken(newer)
            return self.unsettled is not None

    def acknowledge(self, report: Report) -> None:
        """Take ``report`` for the replica's, settle what it covers, and write it if it differs from the last one."""
        with self._lock:
            before, self._report = self._report, report
            settled = [bound for bound, one in self._bounds.items() if one.answer(report.of(bound))]
            self._hand_out(after=settled[0] if settled else None)
            self._write_news()
            for bound in Bound:
                if report.of(bound).applied.revision > (before.of(bound).applied.revision if before else 0):
                    _log_applied(report, bound)

    def revisions(self) -> dict[Bound, int]:
        """Return the newest revision of each bound that all members carried."""
        with self._lock:
            return {bound: one.taken.revision for bound, one in self._bounds.items()}

    def beginning(self) -> Beginning:
        """Return what the next registration begins with."""
        with self._lock:
            return Beginning(tuple(one.taken for one in self._bounds.values()), self._written)

    def adopt(self, registration: Registration) -> bool:
        """Use a registration that was made with :meth:`beginning`; False once closed: the caller keeps it."""
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
            self._taken([one for bound, one in self._bounds.items() if one.resume(registration.words(bound))])
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

    def _taken(self, newer: list[BoundSettlement]) -> None:
        """Hand out what is new, and say at once what the engine never gets."""
        for one in newer:
            if one.is_invalid:
                taken = one.taken
                _log.warning(
                    "revision %d has the invalid %s %d: not applied",
                    taken.revision,
                    taken.bound.value,
                    taken.limit_tokens,
                )
        self._hand_out(after=None)
        self._write_news()

    def _hand_out(self, *, after: Bound | None) -> None:
        """Choose what poll returns: of two pending updates the one that it returned before, but in turns.

        ``after`` is a bound that was settled just now: the other one's turn has come.
        """
        kept = None if self.unsettled is None else self.unsettled.bound
        pending = [one.unsettled for one in self._bounds.values() if one.unsettled is not None and one.has_taker]
        pending.sort(key=lambda update: (update.bound is after, update.bound is not kept))
        self.unsettled = pending[0] if pending else None

    def _write_news(self) -> None:
        """Write the report if it is not what was written last."""
        if self._report is None:
            return
        limit, cap = (one.said(self._report.of(bound)) for bound, one in self._bounds.items())
        report = replace(
            self._report,
            applied=limit.applied,
            settled_revision=limit.settled_revision,
            outcome=limit.outcome,
            reason=limit.reason,
            cap=cap,
        )
        if report != self._written:
            self._written = report
            self._write()

    def _write(self) -> None:
        if self.registration is None or self._written is None:
            return
        try:
            self.registration.acknowledge(self._written)
        except OSError as error:  # in a forked child, which owns nothing, or into a ledger that is lost
            _log.debug("report not written: %s", error)


def _log_applied(report: Report, bound: Bound) -> None:
    """Leave one line per applied update; the policy leaves one per rejected update."""
    applied = report.of(bound).applied
    held = f"no {bound.value}" if applied.limit_tokens < 0 else f"{bound.value} {applied.limit_tokens} tokens"
    _log.info("revision %d applied: %s, %d idle", applied.revision, held, report.idle_tokens)
