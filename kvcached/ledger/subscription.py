"""The engine's side of the ledger: register, poll (hot), acknowledge, and stay registered.

One :class:`Subscription` per replica, held by the process that decides for it (rank 0). It knows no engine: the engine
calls ``poll`` at each scheduler step and ``acknowledge`` after it settled an update. Trouble with the ledger never
reaches the engine as an exception; it serves on without control, says so, and is registered again when it can be.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from kvcached.ledger.settlement import Settlement
from kvcached.ledger.watcher import DAMAGE_PAUSE_S, HOUSEKEEPING_S, LedgerWatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.ledger.registration import Registration, SlotPlace
    from kvcached.values import Identity, Report, Update

REFRESH_S = 0.25
"""How often a busy engine's figures are written at most."""

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
        self._settlement = Settlement(identity)
        self._watcher = LedgerWatcher(self._settlement, identity, gpu_ids, ledger_dir, on_publication)
        self._next_refresh = 0.0
        self._pid = os.getpid()

    def start(self, *, patient: bool = False) -> None:
        """Register and start the watcher.

        Raises :class:`InstanceNameTakenError` if a live engine has the name, unless ``patient``: then the name is
        taken over once that engine is gone. Any other trouble is logged, and the watcher keeps trying.
        """
        self._watcher.start(patient=patient)

    @property
    def registered(self) -> bool:
        """Whether publishers can reach this replica now."""
        return self._settlement.registration is not None

    def place(self) -> SlotPlace | None:
        """Return where this replica's first slot lies now, None while it has none. Any thread."""
        registration = self._settlement.registration
        return None if registration is None else registration.first_place

    def poll(self) -> Update | None:
        """Return the newest complete publication that is not settled yet, or None. The hot path: two attributes.

        The same update is returned until :meth:`acknowledge` reports it settled (applied or rejected), or a newer one
        is read. Of a limit and a cap that are both unsettled one is returned first, and the other once that is settled.
        A cap is returned only to an engine whose report of the cap does not say that it has none. The ledger is read
        by the watcher, when its doorbell rings, and by :meth:`wait`.
        """
        return self._settlement.unsettled

    def acknowledge(self, report: Report) -> None:
        """Report the limit in force; settles the polled update once the report's revision covers it.

        Writes nothing if nothing changed. Never raises.
        """
        if self._is_inherited():
            return
        self._settlement.acknowledge(report)

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
        settlement, stopping = self._settlement, self._watcher.stopping
        while not stopping.is_set():
            with settlement.in_use:
                registration = settlement.registration
                if registration is not None and self._listen_once(registration, deadline):
                    return True
            now = time.monotonic()
            if now >= deadline:
                return False
            if registration is None:
                settlement.registered.wait(min(deadline - now, HOUSEKEEPING_S))
        return False

    def _listen_once(self, registration: Registration, deadline: float) -> bool:
        """Return whether something is unsettled, after a sleep on the doorbell unless that was so at once."""
        try:
            seen = registration.bell()  # before looking for what it announces
            if self._watcher.stopping.is_set():
                return False  # as in the watcher: ``seen`` may count the ring of :meth:`close`
            if self._settlement.look(registration):
                return True
            # A publisher killed between its last store and the doorbell leaves nothing to hear: look by oneself, too.
            registration.sleep(seen, min(deadline, time.monotonic() + HOUSEKEEPING_S))
        except OSError as error:  # the ledger is lost: the watcher registers again
            _log.debug("cannot wait on the ledger: %s", error)
            self._watcher.stopping.wait(min(DAMAGE_PAUSE_S, max(0.0, deadline - time.monotonic())))
        return False

    def close(self) -> None:
        """Give the slots back, stop the watcher and end a :meth:`wait` in another thread. May be called twice.

        ``poll`` and ``acknowledge`` do nothing afterwards.
        """
        if self._is_inherited():
            return
        self._watcher.stopping.set()
        registration = self._settlement.close()
        self._watcher.join()
        if registration is not None:
            self._settlement.dispose(registration)

    def _is_inherited(self) -> bool:
        """Return whether this is a forked child: it owns nothing, has no watcher, and may find our locks taken."""
        return os.getpid() != self._pid
