"""Faults that a run can be asked to show: what the update path does when the engine's own eviction breaks."""

from __future__ import annotations

from kvcached.rig.block_cache import BlockCache


class InjectedFaultError(RuntimeError):
    """Raised by ``--fault evict`` inside the eviction that the limit ordered, on every rank alike."""


class FailingCache(BlockCache):
    """A cache whose ordered evictions raise; blocks that requests need are still made room for."""

    def __init__(self, blocks: int, block_tokens: int, failures: int | None) -> None:
        """Make a pool as :class:`BlockCache` does, of which the first ``failures`` evictions raise (None: all)."""
        super().__init__(blocks, block_tokens)
        self._failures = failures

    def evict(self, tokens: int) -> int:
        """Raise :class:`InjectedFaultError` as often as asked for, then evict."""
        if self._failures is None:
            message = "injected by --fault evict"
            raise InjectedFaultError(message)
        if self._failures > 0:
            self._failures -= 1
            message = f"injected by --fault evict, {self._failures} more to come"
            raise InjectedFaultError(message)
        return super().evict(tokens)
