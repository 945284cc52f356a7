"""The engine's side of the ledger: register, poll (hot), acknowledge, and stay registered.

One :class:`Subscription` per replica, held by the process that decides for it (rank 0). It knows no engine: the engine
calls ``poll`` at each scheduler step and ``acknowledge`` after it settled an update. Trouble with the ledger never
reaches the engine as an exception; it serves on without control, says so, and is registered again when it can be.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached import _native
from kvcached.registration import InstanceNameTakenError, RegistrationError, register
from kvcached.values import UNLIMITED, Outcome, Report, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.registration import Registration, SlotPlace
    from kvcached.values import Identity

HOUSEKEEPING_S = 1.0
"""How often the watcher checks that the ledger files are still the registered ones, and retries a registration."""

REFRESH_S = 0.25
"""How often a busy engine's figures are written at most."""

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
            on_publication: Called on the watcher's thread when something unsettled stands in the ledger, to wake an
                engine that idles. None for an engine that sleeps in :meth:`wait`.

        """
        self._identity = identity
        self._gpu_ids = tuple(gpu_ids)
        self._ledger_dir = ledger_dir
        self._on_publication = on_publication
        # The hot look compares these two. Words are only ever raised, so a word that changed has another revision.
        self._newest = _private_revision(0)
        self._settled_revision = 0
        self._offered = Update(0, identity.startup_limit_tokens)
        self._rejected = Update(0, 0)
        self._report: Report | None = None
        self._next_refresh = 0.0
        self._lock = threading.Lock()  # guards the registration and all of the above but the hot look
        self._registration: Registration | None = None
        self._retired: list[Registration] = []  # released, but the scheduler may be looking at their words
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
        """Return the newest complete publication that is not settled yet, or None. The hot path.

        The same update is returned until :meth:`acknowledge` reports it settled (applied or rejected): comparing with
        what was merely seen would lose a publication that was met half-way.
        """
        if self._newest[0] == self._settled_revision:
            return None
        return self._look()

    def _look(self) -> Update | None:
        with self._lock:
            update = self._registration.agreed() if self._registration is not None else None
            if update is None or update.revision <= self._settled_revision:
                return None
            self._offered = update
            if update.limit_tokens >= UNLIMITED:
                return update
            self._reject_invalid(update)
            return None

    def acknowledge(self, report: Report) -> None:
        """Report what the engine holds to; settles the polled update once the report's revision covers it.

        Writes nothing if nothing changed. Never raises.
        """
        with self._lock:
            self._settled_revision = max(self._settled_revision, report.settled_revision)
            if self._rejected.revision > report.settled_revision:
                report = _as_invalid(report, self._rejected)
            if report != self._report:
                before, self._report = self._report, report
                self._write()
                if report.applied.revision > (before.applied.revision if before is not None else 0):
                    _log_applied(report)
            for registration in self._retired:  # this is the scheduler's thread: it looks at none of them now
                registration.close()
            self._retired.clear()

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

        For an engine whose scheduler thread sleeps here while it idles.
        """
        while True:
            registration = self._registration
            if registration is None:
                if not self._registered.wait(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
                    return False
                continue
            seen = registration.last_handle.bell(_native.PUBLISHED)  # before looking for what it announces
            if registration is self._registration and self.poll() is not None:
                return True
            if time.monotonic() >= deadline:
                return False
            # A publisher killed between its last store and the doorbell leaves nothing to hear: look by oneself, too.
            registration.last_handle.wait(_native.PUBLISHED, seen, min(deadline, time.monotonic() + HOUSEKEEPING_S))

    def close(self) -> None:
        """Give the slots back and stop the watcher. No other method may be called afterwards."""
        self._stopping.set()
        with self._lock:
            if self._registration is not None:
                self._registration.release()
        if self._watcher.is_alive():
            self._watcher.join()
        with self._lock:
            self._newest = _private_revision(self._settled_revision)
            for registration in [*self._retired, *([self._registration] if self._registration else [])]:
                registration.close()
            self._retired.clear()
            self._registration = None

    def _reject_invalid(self, update: Update) -> None:
        """Settle a word that makes no sense, which only a broken or hostile publisher writes."""
        _log.warning(
            "revision %d has the limit %d, which means nothing: not applied", update.revision, update.limit_tokens
        )
        self._rejected = update
        self._settled_revision = update.revision
        if self._report is not None:
            self._report = _as_invalid(self._report, update)
            self._write()

    def _write(self) -> None:
        if self._registration is None or self._report is None:
            return
        try:
            self._registration.acknowledge(self._report)
        except OSError as error:  # in a forked child, which owns nothing
            _log.debug("report not written: %s", error)

    # The watcher ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.is_set():
            deadline = time.monotonic() + HOUSEKEEPING_S
            if self._registration is None or self._on_publication is None:
                self._stopping.wait(HOUSEKEEPING_S)
            else:
                self._listen(self._registration, self._on_publication, deadline)
            if not self._stopping.is_set():
                self._keep_registered()

    def _listen(self, registration: Registration, wake: Callable[[], None], deadline: float) -> None:
        while not self._stopping.is_set() and time.monotonic() < deadline:
            seen = registration.last_handle.bell(_native.PUBLISHED)  # before looking for what it announces
            if registration.newest[0] != self._settled_revision:
                wake()
            registration.last_handle.wait(_native.PUBLISHED, seen, deadline)

    def _keep_registered(self) -> None:
        registration = self._registration
        if registration is not None:
            _native.guard_mappings()
            if registration.is_current():
                return
            self._retire(registration)
        try:
            self._register()
        except InstanceNameTakenError as error:
            self._warn(str(error))

    def _retire(self, registration: Registration) -> None:
        """Give up slots of which a file was removed or replaced, without losing what was published into them."""
        _log.warning("a ledger file of %s was removed or replaced; registering again", self._identity.instance_name)
        with self._lock:
            registration.release()
            # Publishers confirm after writing that the slot is still owned. Looking once more after the release means
            # that whatever was confirmed is seen here.
            update = registration.agreed()
            if update is not None and update.revision > self._offered.revision:
                self._offered = update
            # The scheduler unmaps retired ledgers at its next report, maybe long before there are others: from now on
            # the hot look must not lead there.
            self._newest = _private_revision(self._settled_revision)
            self._retired.append(registration)
            self._registration = None
            self._registered.clear()

    def _register(self) -> None:
        try:
            registration = register(self._identity, self._gpu_ids, self._ledger_dir, self._offered)
        except RegistrationError as error:
            self._warn(str(error))
            return
        with self._lock:
            self._registration = registration
            self._newest = registration.newest
            self._write()
            self._registered.set()
        _log.info("instance %s takes publications in %s", self._identity.instance_name, self._ledger_dir)

    def _warn(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + WARN_AGAIN_S
            _log.warning("the retention limit cannot be changed at run time for now: %s", text)


def _private_revision(revision: int) -> memoryview:
    """Return what the hot look reads while there is no registration."""
    return memoryview(revision.to_bytes(4, sys.byteorder)).cast("I")


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
        reason=f"revision {update.revision} carries the limit {update.limit_tokens}, which means nothing",
    )
