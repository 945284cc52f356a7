"""SGLang's prefix caches as the policy wants to see one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class UnsupportedCacheError(Exception):
    """The scheduler's prefix cache cannot say how many idle tokens it holds; the message names its class."""


class RadixPrefixCache:
    """The prefix cache of one scheduler; implements :class:`kvcached.policy.PrefixCache`.

    Idle tokens are those of full attention, the one kind that every cache class counts; in models with sliding-window
    or state-space layers, what the other layers keep for a token goes with it. Eviction takes whole leaves of the
    tree, so it can take more than was asked for. Scheduler thread only.
    """

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 - SGLang's scheduler
        """Adapt the cache of ``scheduler``; raises :class:`UnsupportedCacheError` if it cannot be governed."""
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._params = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache").EvictParams
        self.block_tokens = int(self._tree.page_size)
        self.idle_tokens: Callable[[], int] = _idle_counter(self._tree)
        self.withheld_tokens: Callable[[], int] = _none
        """Counts the tokens that the cap withholds, which are neither free nor held."""
        self._capacity, self._available = _pool_counters(self._allocator)

    def active_tokens(self) -> int:
        """Return how many tokens requests and open sessions hold, in the tree or outside of it."""
        return max(self._capacity() - self.withheld_tokens() - self._available() - self.idle_tokens(), 0)

    def capacity_tokens(self) -> int:
        """Return how many tokens the pool can hold in all."""
        return self._capacity()

    def evict(self, tokens: int) -> int:
        """Evict leaves until at least ``tokens`` are gone or none is left; returns how many idle tokens went.

        The cache counts them itself: one that completes transfers while it evicts has more idle tokens afterwards.
        """
        return int(self._tree.evict(self._params(num_tokens=tokens)).num_tokens_evicted)


def _none() -> int:
    return 0


def _idle_counter(tree: Any) -> Callable[[], int]:  # noqa: ANN401
    """Return the method of ``tree`` that counts evictable tokens.

    The order matters: the general name is right for most classes, and the older sliding-window and state-space caches
    raise there on purpose and want the special one, which in its turn is a silent 0 in most others.
    """
    for name in ("evictable_size", "full_evictable_size"):
        counter: Callable[[], int] | None = getattr(tree, name, None)
        if counter is None:
            continue
        try:
            if isinstance(counter(), int):
                return counter
        except NotImplementedError:
            continue
    message = f"the prefix cache {type(tree).__name__} does not count its evictable tokens"
    raise UnsupportedCacheError(message)


def _pool_counters(allocator: Any) -> tuple[Callable[[], int], Callable[[], int]]:  # noqa: ANN401
    """Return the methods that count all and the free tokens of the pool that the idle count is about."""
    if allocator.size_full == 0:  # every layer has a sliding window: that pool is the only one
        return (lambda: int(allocator.size_swa)), allocator.swa_available_size
    available = getattr(allocator, "full_available_size", allocator.available_size)
    return (lambda: int(allocator.size_full)), available
