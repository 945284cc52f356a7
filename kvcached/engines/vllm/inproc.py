"""An engine core without a loop of its own (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).

While such an engine idles, no thread of it runs that could take an update over. The subscription's watcher thread does
it instead, under a lock that every entry of the application into the engine core takes.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from kvcached.engines.vllm.wraps import Wraps
from kvcached.guards import call_guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.vllm.governor import Governor, StepSubscription

STEPS = ("step_fn", "post_step")
"""What an engine step consists of; the hook after it acts."""

ENTRIES = (
    "add_request",
    "abort_requests",
    "reset_prefix_cache",
    "pause_scheduler",
    "resume_scheduler",
    "sleep",
    "wake_up",
)
"""The other methods of an engine core through which the application reaches the block pool."""

BREATH_S = 0.0001
"""How long the application has to get in between two chunks of a drop; a lock alone does not let it."""


class InprocGovernor:
    """Lets one thread at a time into an in-process engine core, and acts for its governor on whichever that is."""

    def __init__(self, engine: Any, on_fault: Callable[[Exception], None]) -> None:  # noqa: ANN401 - vLLM's EngineCore
        """Guard the entries of ``engine``, on this one object. ``on_fault`` gets what goes wrong outside its steps."""
        self._lock = threading.RLock()
        self._scheduler = engine.scheduler
        self._on_fault = on_fault
        self._governor: Governor | None = None
        self._inside = 0
        self._wraps = Wraps()
        for name in (*STEPS, *ENTRIES):
            method = getattr(engine, name, None)
            if method is not None:
                then = self._after_entry if name in ENTRIES else None
                self._wraps.replace(engine, name, self._guarded(method, then))

    def serve(self, governor: Governor) -> None:
        """Begin to act for ``governor``."""
        self._governor = governor

    @property
    def subscription(self) -> StepSubscription | None:
        """The ledger slot of this engine core."""
        return None if self._governor is None else self._governor.subscription

    def on_publication(self) -> None:
        """Take a publication over on the watcher's thread, as soon as the application is not in the engine."""
        call_guarded(self._on_fault, self._drain)  # the watcher has to live on, for the slot's sake

    def on_step(self) -> None:
        """Act after an engine step; the last step of a busy time finishes what is begun, as no other will follow."""
        with self._lock:
            if self._governor is not None:
                self._governor.on_step()
        if not self._scheduler.has_unfinished_requests():
            self._drain()

    def on_idle(self) -> None:
        """Act for an engine that was just built."""
        self._drain()

    def on_shutdown(self) -> None:
        """Give the ledger slot back, as the engine core is shut down."""
        if self._governor is not None:
            self._governor.on_shutdown()

    def detach(self) -> None:
        """Leave the engine to itself: give all methods back, and write nothing more but the slot."""
        with self._lock:
            governor, self._governor = self._governor, None
            self._wraps.undo()
            if governor is not None:
                governor.detach()

    def _drain(self) -> None:
        """Work a drop off to its end, giving the application a chance between two chunks."""
        draining = self._turn()
        while draining:
            time.sleep(BREATH_S)
            draining = self._turn()

    def _turn(self) -> bool:
        with self._lock:
            governor = self._governor
            if governor is None:
                return False
            governor.on_idle()
            return governor.draining

    def _guarded(self, method: Callable[..., Any], then: Callable[[], None] | None = None) -> Callable[..., Any]:
        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with self._lock:
                self._inside += 1
                try:
                    return method(*args, **kwargs)
                finally:
                    self._inside -= 1
                    if then is not None and not self._inside:
                        call_guarded(self._on_fault, then)

        return guarded

    def _after_entry(self) -> None:
        """Enforce the limit on what an entry released: maybe no step follows."""
        if self._governor is not None and self._governor.has_released:
            self.on_step()
