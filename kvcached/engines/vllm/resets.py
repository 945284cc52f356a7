"""Calls of vLLM that want the pool whole: its reset of the prefix cache, which sleep, pause and a reload end in.

vLLM refuses it while blocks are in use, and withheld ones are. So they are given back before it, and taken after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached.engines.vllm.wraps import Wraps

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.replica_policy import ReplicaPolicy


class WholeForResets:
    """Lifts the cap around each reset of one pool."""

    def __init__(self, pool: Any, on_fault: Callable[[Exception], None]) -> None:  # noqa: ANN401
        """Follow the resets of vLLM's ``BlockPool`` ``pool``. ``on_fault`` gets an exception of our own step.

        To be made before what else follows the pool, and detached after it: wraps are given back in turn.
        """
        self.policy: ReplicaPolicy | None = None
        """Whose cap is lifted; nothing is done before it is known, and after the control ended."""
        self.recount: Callable[[], None] = _nothing
        """Counts the pool afresh, which a reset changes as a whole: what takes blocks again has to know."""
        self._on_fault = on_fault
        self._wraps = Wraps()
        stock = pool.reset_prefix_cache

        def reset_prefix_cache(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever vLLM passes and returns
            policy = self.policy
            if policy is None:
                return stock(*args, **named)
            self._try(policy.lift)
            try:
                return stock(*args, **named)
            finally:
                self._try(self._resume)

        self._wraps.replace(pool, "reset_prefix_cache", reset_prefix_cache)

    def detach(self) -> None:
        """Give the stock method back."""
        self._wraps.undo()

    def _resume(self) -> None:
        if self.policy is not None:
            self.recount()
            self.policy.resume()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - a fault of ours must not be vLLM's
            self._on_fault(error)


def _nothing() -> None:
    """Do nothing."""
