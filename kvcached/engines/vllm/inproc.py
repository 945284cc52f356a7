"""An engine core without a loop of its own (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).

While such an engine idles, no thread of it runs that could take an update over. The subscription's watcher thread does
it instead, under a lock that every entry of the application into the engine core takes.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.vllm.governor import Governor

ENTRIES = (
    "step_fn",
    "post_step",
    "add_request",
    "abort_requests",
    "reset_prefix_cache",
    "pause_scheduler",
    "resume_scheduler",
    "sleep",
    "wake_up",
)
"""The methods of an engine core through which the application reaches the block pool."""


class InprocGovernor:
    """Lets one thread at a time into an in-process engine core, and acts for its governor on whichever that is."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - vLLM's EngineCore
        """Guard the entries of ``engine``, on this one object."""
        self._lock = threading.RLock()
        self._scheduler = engine.scheduler
        self._governor: Governor | None = None
        for name in ENTRIES:
            method = getattr(engine, name, None)
            if method is not None:
                setattr(engine, name, self._guarded(method))

    def serve(self, governor: Governor) -> None:
        """Begin to act for ``governor``."""
        self._governor = governor

    def on_publication(self) -> None:
        """Take a publication over on the watcher's thread, as soon as the application is not in the engine."""
        self._drain()

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

    def _drain(self) -> None:
        """Work a drop off to its end, giving the application a chance between two chunks."""
        governor = self._governor
        draining = governor is not None
        while draining and governor is not None:
            with self._lock:
                governor.on_idle()
                draining = governor.draining

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with self._lock:
                return method(*args, **kwargs)

        return guarded
