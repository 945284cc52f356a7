"""The thread that listens for publications to a replica, and keeps the replica registered."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from kvcached.ledger.registration import InstanceNameTakenError, RegistrationError, register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.ledger.registration import MemberFault, Registration
    from kvcached.ledger.settlement import Settlement
    from kvcached.values import Identity

HOUSEKEEPING_S = 1.0
"""How often the watcher checks that the ledger files are still the registered ones, and retries a registration."""

DAMAGE_PAUSE_S = 0.05
"""How long a thread that meets a lost ledger waits before it looks again; meanwhile the watcher registers again."""

WARN_AGAIN_S = 60.0
"""How often standing trouble with the ledger is logged."""

_log = logging.getLogger("kvcached.ledger.subscription")  # one name for all that a subscription says


class LedgerWatcher:
    """A daemon thread. It alone makes and replaces registrations, once :meth:`start` was called."""

    def __init__(
        self,
        settlement: Settlement,
        identity: Identity,
        gpu_ids: Sequence[str],
        ledger_dir: str,
        on_publication: Callable[[], None] | None,
    ) -> None:
        """Prepare the thread; the arguments are those of ``Subscription``."""
        self._settlement = settlement
        self._identity = identity
        self._gpu_ids = tuple(gpu_ids)
        self._ledger_dir = ledger_dir
        self._on_publication = on_publication
        self._damaged: tuple[MemberFault, ...] = ()  # files that the next registration sets aside
        self._next_warning = 0.0
        self._thread = threading.Thread(target=self._watch, name="kvcached-watcher", daemon=True)
        self.stopping = threading.Event()

    def start(self, *, patient: bool) -> None:
        """Register once on the calling thread, then start the watcher's own. Raises as ``Subscription.start``."""
        try:
            self._register()
        except InstanceNameTakenError as error:
            if not patient:
                raise
            self._warn(str(error))
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended, after ``stopping`` was set and the slots were given up."""
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self.stopping.is_set():
            registration = self._settlement.registration
            if registration is None:
                self.stopping.wait(HOUSEKEEPING_S)
            else:
                self._listen(registration, time.monotonic() + HOUSEKEEPING_S)
            if not self.stopping.is_set():
                self._keep_registered()

    def _listen(self, registration: Registration, deadline: float) -> None:
        try:
            while not self.stopping.is_set() and time.monotonic() < deadline:
                seen = registration.bell()  # before looking for what it announces
                if self.stopping.is_set():
                    return  # set before the ring that ends this sleep, which ``seen`` may count already
                if self._settlement.look(registration) and self._on_publication is not None:
                    self._on_publication()
                registration.sleep(seen, deadline)
        except OSError as error:
            _log.debug("cannot wait on the ledger: %s", error)
            self.stopping.wait(DAMAGE_PAUSE_S)

    def _keep_registered(self) -> None:
        old = self._settlement.registration
        if old is not None:
            faults = old.faults(self._settlement.revisions())
            if not faults:
                return
            self._retire(old, faults)
        try:
            self._register()
        except InstanceNameTakenError as error:
            self._warn(str(error))
        finally:
            if old is not None:
                self._settlement.dispose(old)

    def _retire(self, registration: Registration, faults: Sequence[MemberFault]) -> None:
        for fault in faults:
            _log.warning("the ledger of %s %s; registering again", fault.gpu, fault.reason)
        if self._settlement.retire(registration):
            self._damaged = tuple(fault for fault in faults if fault.damaged)

    def _register(self) -> None:
        beginning = self._settlement.beginning()
        try:
            registration = register(self._identity, self._gpu_ids, self._ledger_dir, beginning, self._damaged)
        except RegistrationError as error:
            self._warn(str(error))
            return
        if not self._settlement.adopt(registration):
            registration.close()
            return
        self._damaged = ()
        _log.info("instance %s accepts publications in %s", self._identity.instance_name, self._ledger_dir)

    def _warn(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + WARN_AGAIN_S
            _log.warning("the retention limit cannot be changed at run time at the moment: %s", text)
