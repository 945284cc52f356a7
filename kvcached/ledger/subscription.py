"""The engine's side of the ledger: register, poll (hot), acknowledge, and stay registered.

One :class:`Subscription` per replica, held by the process that decides for it (rank 0). It knows no engine: the engine
calls ``poll`` at each scheduler step and ``acknowledge`` after it settled an update. Trouble with the ledger never
reaches the engine as an exception; it serves on without control, says so, and is registered again when it can be.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached.ledger.registration import InstanceNameTakenError, RegistrationError, register
from kvcached.ledger.resumption import resume_from
from kvcached.values import UNLIMITED, Outcome, Report, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.ledger.registration import MemberFault, Registration, SlotPlace
    from kvcached.values import Identity

HOUSEKEEPING_S = 1.0
"""How often the watcher checks that the ledger files are still the registered ones, and retries a registration."""

REFRESH_S = 0.25
"""How often a busy engine's figures are written at most."""

DAMAGE_PAUSE_S = 0.05
"""How long a thread that meets a lost ledger waits before it looks again; meanwhile the watcher registers again."""

WARN_AGAIN_S = 60.0
"""How often standing trouble with the ledger is logged."""

_log = logging.getLogger(__name__)


class Subscription:
    """A replica's registration in the ledgers of its GPUs.

    ``poll``, ``acknowledge``, ``refresh`` and ``wait`` are for the scheduler's thread; ``start`` and ``close`` for any
    one thread. A daemon thread, the watcher, listens to the doorbell and keeps the registration alive.
    """

    def __init__(
        self,
        identity: Identity,
        gpu_ids: Sequence[str],
        ledger_dir: str,
        *,
        on_publication: Callable[[], None] | None = None,
    ) -> None:
        """Prepare a registration; nothing is touched before :meth:`start`.

        Args:
            identity: Who the replica is.
            gpu_ids: Its members, each once.
            ledger_dir: The ledger directory.
            on_publication: Called on the watcher's thread when something unsettled is stored in the ledger, to wake an
                engine that idles. None for an engine that sleeps in :meth:`wait`.

        """
        self._identity = identity
        self._gpu_ids = tuple(gpu_ids)
        self._ledger_dir = ledger_dir
        self._on_publication = on_publication
        self._unsettled: Update | None = None  # what poll returns; set where the ledger is read, cleared when settled
        self._settled_revision = 0
        self._taken = Update(0, identity.startup_limit_tokens)  # the newest pair that all members carried
        self._rejected = Update(0, 0)
        self._report: Report | None = None
        self._next_refresh = 0.0
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the registration and all of the above but what poll reads
        self._handles = threading.Lock()  # held while wait uses a registration: nobody closes it meanwhile
        self._registration: Registration | None = None
        self._damaged: tuple[MemberFault, ...] = ()  # files that the next registration sets aside
        self._stopping = threading.Event()
        self._registered = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="kvcached-watcher", daemon=True)
        self._next_warning = 0.0

    def start(self, *, patient: bool = False) -> None:
        """Register and start the watcher.

        Raises :class:`InstanceNameTakenError` if a live engine has the name, unless ``patient``: then the name is
        taken over once that engine is gone. Any other trouble is logged, and the watcher keeps trying.
        """
        try:
            self._register()
        except InstanceNameTakenError as error:
            if not patient:
                raise
            self._warn(str(error))
        self._watcher.start()

    @property
    def registered(self) -> bool:
        """Whether publishers can reach this replica now."""
        return self._registration is not None

    def place(self) -> SlotPlace | None:
        """Return where this replica's first slot lies now, None while it has none. Any thread."""
        registration = self._registration
        return None if registration is None else registration.first_place

    def poll(self) -> Update | None:
        """Return the newest complete publication that is not settled yet, or None. The hot path: one attribute.

        The same update is returned until :meth:`acknowledge` reports it settled (applied or rejected), or a newer one
        is read. The ledger is read by the watcher, when its doorbell rings, and by :meth:`wait`.
        """
        return self._unsettled

    def _look(self, registration: Registration) -> bool:
        """Read the ledger; return whether something is unsettled."""
        with self._lock:
            if registration is self._registration:
                update = registration.agreed()
                if update is not None and update.revision > self._taken.revision:
                    self._take(update)
            return self._unsettled is not None

    def _take(self, update: Update) -> None:
        self._taken = update
        if update.limit_tokens >= UNLIMITED:
            self._unsettled = update
        else:
            self._unsettled = None
            self._reject_invalid(update)

    def acknowledge(self, report: Report) -> None:
        """Report the limit in force; settles the polled update once the report's revision covers it.

        Writes nothing if nothing changed. Never raises.
        """
        if self._is_inherited():
            return
        with self._lock:
            self._settled_revision = max(self._settled_revision, report.settled_revision)
            if self._unsettled is not None and self._unsettled.revision <= self._settled_revision:
                self._unsettled = None
            if self._rejected.revision > report.settled_revision:
                report = _as_invalid(report, self._rejected)
            if report != self._report:
                before, self._report = self._report, report
                self._write()
                if report.applied.revision > (before.applied.revision if before is not None else 0):
                    _log_applied(report)

    def refresh(self, report_of: Callable[[], Report], *, idle: bool = False) -> None:
        """Report the engine's figures if the last report is older than ``REFRESH_S`` seconds.

        With ``idle`` (the engine is about to sleep) it is brought up to date at once. Call at each step.
        """
        now = time.monotonic()
        if idle or now >= self._next_refresh:
            self._next_refresh = now + REFRESH_S
            self.acknowledge(report_of())

    def wait(self, deadline: float) -> bool:
        """Sleep until something unsettled was published; False when ``time.monotonic()`` reached ``deadline`` first.

        For an engine whose scheduler thread sleeps here while it idles. :meth:`close` ends it at once, with False.
        """
        if self._is_inherited():
            time.sleep(max(0.0, deadline - time.monotonic()))
            return False
        while not self._stopping.is_set():
            with self._handles:
                registration = self._registration
                if registration is not None and self._listen_once(registration, deadline):
                    return True
            now = time.monotonic()
            if now >= deadline:
                return False
            if registration is None:
                self._registered.wait(min(deadline - now, HOUSEKEEPING_S))
        return False

    def _listen_once(self, registration: Registration, deadline: float) -> bool:
        """Return whether something is unsettled, after a sleep on the doorbell unless that was so at once."""
        try:
            seen = registration.bell()  # before looking for what it announces
            if self._look(registration):
                return True
            # A publisher killed between its last store and the doorbell leaves nothing to hear: look by oneself, too.
            registration.sleep(seen, min(deadline, time.monotonic() + HOUSEKEEPING_S))
        except OSError as error:  # the ledger is lost: the watcher registers again
            _log.debug("cannot wait on the ledger: %s", error)
            self._stopping.wait(min(DAMAGE_PAUSE_S, max(0.0, deadline - time.monotonic())))
        return False

    def close(self) -> None:
        """Give the slots back, stop the watcher and end a :meth:`wait` in another thread. May be called twice.

        ``poll`` and ``acknowledge`` do nothing afterwards.
        """
        if self._is_inherited():
            return
        self._stopping.set()
        self._registered.set()  # whoever waits for a registration
        with self._lock:
            registration, self._registration = self._registration, None
            if registration is not None:
                registration.unregister()
        if self._watcher.is_alive():
            self._watcher.join()
        if registration is not None:
            self._dispose(registration)

    def _is_inherited(self) -> bool:
        """Return whether this is a forked child: it owns nothing, has no watcher, and may find our locks taken."""
        return os.getpid() != self._pid

    def _dispose(self, registration: Registration) -> None:
        with self._handles:
            registration.close()

    def _reject_invalid(self, update: Update) -> None:
        """Settle a word that makes no sense, which only a broken or hostile publisher writes."""
        _log.warning("revision %d has the invalid limit %d: not applied", update.revision, update.limit_tokens)
        self._rejected = update
        self._settled_revision = max(self._settled_revision, update.revision)
        if self._report is not None:
            self._report = _as_invalid(self._report, update)
            self._write()

    def _write(self) -> None:
        if self._registration is None or self._report is None:
            return
        try:
            self._registration.acknowledge(self._report)
        except OSError as error:  # in a forked child, which owns nothing, or into a ledger that is lost
            _log.debug("report not written: %s", error)

    # The watcher ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.is_set():
            registration = self._registration
            if registration is None:
                self._stopping.wait(HOUSEKEEPING_S)
            else:
                self._listen(registration, time.monotonic() + HOUSEKEEPING_S)
            if not self._stopping.is_set():
                self._keep_registered()

    def _listen(self, registration: Registration, deadline: float) -> None:
        try:
            while not self._stopping.is_set() and time.monotonic() < deadline:
                seen = registration.bell()  # before looking for what it announces
                if self._look(registration) and self._on_publication is not None:
                    self._on_publication()
                registration.sleep(seen, deadline)
        except OSError as error:
            _log.debug("cannot wait on the ledger: %s", error)
            self._stopping.wait(DAMAGE_PAUSE_S)

    def _keep_registered(self) -> None:
        old = self._registration
        if old is not None:
            faults = old.faults(self._taken.revision)
            if not faults:
                return
            self._retire(old, faults)
        try:
            self._register()
        except InstanceNameTakenError as error:
            self._warn(str(error))
        finally:
            if old is not None:
                self._dispose(old)

    def _retire(self, registration: Registration, faults: Sequence[MemberFault]) -> None:
        """Give up slots that publishers cannot reach, without losing what was published into them."""
        for fault in faults:
            _log.warning("the ledger of %s %s; registering again", fault.gpu, fault.reason)
        with self._lock:
            if self._registration is not registration:
                return  # closed meanwhile
            self._registration = None
            self._registered.clear()
            self._damaged = tuple(fault for fault in faults if fault.damaged)
            # Publishers confirm after writing that the slot is still owned. Looking once more after giving it up means
            # that whatever was confirmed is seen here.
            registration.unregister()
            before, after = self._taken, resume_from(registration.words(), self._taken, self._limit_in_force())
            if after != before:
                self._take(after)

    def _limit_in_force(self) -> int:
        if self._unsettled is not None:
            return self._unsettled.limit_tokens  # on its way to the engine
        return self._identity.startup_limit_tokens if self._report is None else self._report.applied.limit_tokens

    def _register(self) -> None:
        try:
            registration = register(self._identity, self._gpu_ids, self._ledger_dir, self._taken, self._damaged)
        except RegistrationError as error:
            self._warn(str(error))
            return
        with self._lock:
            if self._stopping.is_set():
                registration.close()
                return
            self._registration = registration
            self._damaged = ()
            self._write()
            self._registered.set()
        _log.info("instance %s accepts publications in %s", self._identity.instance_name, self._ledger_dir)

    def _warn(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + WARN_AGAIN_S
            _log.warning("the retention limit cannot be changed at run time at the moment: %s", text)


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
