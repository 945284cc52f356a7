"""Makes the prefix cache's eviction raise, on every rank, while a file named ``fault`` stands in the probe folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached_probes.places import Log, folder, when_placed

if TYPE_CHECKING:
    from collections.abc import Callable


class InjectedError(RuntimeError):
    """The exception that the probe injects."""


class FaultyEviction:
    """Stands in for the ``evict`` method of one prefix cache and counts its calls in the probe folder."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 - SGLang's scheduler
        self._log = Log(scheduler)
        self._evict: Callable[[Any], Any] = scheduler.tree_cache.evict
        scheduler.tree_cache.evict = self

    def __call__(self, params: Any) -> Any:  # noqa: ANN401 - SGLang's EvictParams
        """Evict, or raise while the fault is injected."""
        fails = (folder() / "fault").exists()
        self._log.write(event="evict", fails=fails)
        if fails:
            message = "injected by a test"
            raise InjectedError(message)
        return self._evict(params)


def install() -> None:
    """Prepare the fault in this process."""
    when_placed(FaultyEviction)
