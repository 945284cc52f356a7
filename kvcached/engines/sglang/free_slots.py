"""Free slots taken out of SGLang's pool, and the totals that its own checks compare the pool with.

A slot holds one token; the allocator deals in pages of one or more of them. A page that was taken out is in no list of
the allocator any more, so requests find a smaller pool: they queue, are retracted and evict as in any full one. SGLang
checks while idle that free, cached and used slots make up the whole pool and ends if they do not, so what it takes for
the whole is lowered by as much.

Which pages go is decided by the lists alone, which are equal on all ranks in step. Scheduler thread only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALLOCATORS = (
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator",
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator",
)
"""The classes whose lists are known here; a subclass may keep others."""

_LISTS = ("free_pages", "merge_and_sort_free", "available_size", "clear", "free", "need_sort", "size", "page_size")
_TOTALS = ("invariant_checker", "pool_stats_observer")
_TOTAL = "max_total_num_tokens"


MAX_SORTED = 131072
"""How many pages are sorted at most: about 2 ms on two slow cores."""


class UnsupportedPoolError(Exception):
    """Nothing can be taken out of this pool; the message says why."""


def explain_pool(scheduler: Any) -> str:  # noqa: ANN401 - SGLang's scheduler
    """Return why nothing can be taken out of the pool of ``scheduler``, ``""`` if that can be done.

    Valid from ``Scheduler.init_request_dispatcher`` on; the totals, which come later, are left to :class:`FreeSlots`.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    kind = type(allocator)
    if f"{kind.__module__}.{kind.__qualname__}" not in ALLOCATORS:
        return f"a pool of {kind.__name__} cannot be capped"
    missing = [name for name in _LISTS if not hasattr(allocator, name)]
    if missing:
        return f"this SGLang's {kind.__name__} has no {', '.join(missing)}"
    for attribute, feature in (("is_hybrid_swa", "sliding windows"), ("is_hybrid_ssm", "state-space layers")):
        if getattr(scheduler, attribute, False):
            return f"the pools of a model with {feature} cannot be capped"
    return ""


class FreeSlots:
    """The pages that were taken out of one scheduler's pool."""

    def __init__(self, scheduler: Any, on_clear: Callable[[], None]) -> None:  # noqa: ANN401 - SGLang's scheduler
        """Prepare to take pages out of the pool of ``scheduler``, which must be built to the end.

        ``on_clear`` is called after SGLang emptied its pool, as its own flush does: no page is out any more then.
        Raises :class:`UnsupportedPoolError` if this SGLang lacks something, before anything was changed.
        """
        reason = explain_pool(scheduler) or _explain_totals(scheduler)
        if reason:
            raise UnsupportedPoolError(reason)
        self._torch = importlib.import_module("torch")
        self._allocator = allocator = scheduler.token_to_kv_pool_allocator
        self._totals = [(getattr(scheduler, name), getattr(getattr(scheduler, name), _TOTAL)) for name in _TOTALS]
        self.page_tokens = int(allocator.page_size)
        self._out = allocator.free_pages[:0]
        self._sorted = None
        self._on_clear = on_clear
        self._stock_clear: Callable[[], None] = allocator.clear
        self._stock_free: Callable[[Any], None] = allocator.free
        allocator.clear = self._clear

    @property
    def out_pages(self) -> int:
        """How many pages are out."""
        return len(self._out)

    def free_tokens(self) -> int:
        """Return how many tokens requests could be given without any eviction."""
        return int(self._allocator.available_size())

    def free_pages(self) -> list[int]:
        """Return the free pages in the order in which requests get them."""
        self._allocator.merge_and_sort_free()
        pages: list[int] = self._allocator.free_pages.tolist()
        return pages

    def take_out(self, pages: int) -> list[int]:
        """Take up to ``pages`` free pages out, those that requests would get last; returns them.

        The list is sorted before, so that these are the ones with the highest numbers, in few long runs.
        """
        self._sort()
        free = self._allocator.free_pages
        count = min(pages, len(free))
        if count <= 0:
            return []
        taken = free[len(free) - count :]
        self._allocator.free_pages = self._sorted = free[: len(free) - count]
        self._set_out(self._torch.cat((taken, self._out)))
        numbers: list[int] = taken.tolist()
        return numbers

    def put_back(self, pages: int) -> int:
        """Put up to ``pages`` pages back, those that were taken last; returns how many.

        Requests get them after all other free ones.
        """
        allocator = self._allocator
        count = min(pages, len(self._out))
        if count > 0:
            allocator.free_pages = self._torch.cat((allocator.free_pages, self._out[:count]))
            self._set_out(self._out[count:])
        return count

    def reuse_newest_first(self) -> None:
        """Put pages that are freed from now on before all free ones, where the allocator puts them last."""
        allocator = self._allocator
        if self.page_tokens == 1 and not allocator.need_sort:
            allocator.free = self._free_to_front

    def out_numbers(self) -> Iterator[int]:
        """Return the pages that are out."""
        return iter(self._out.tolist())

    def _sort(self) -> None:
        """Sort the free pages, unless nobody changed them since, or they are so many that it would hold a step up."""
        allocator, torch = self._allocator, self._torch
        allocator.merge_and_sort_free()
        free = allocator.free_pages
        if free is self._sorted or len(free) > MAX_SORTED:
            return
        present = torch.zeros(int(allocator.size) // self.page_tokens + 1, dtype=torch.bool, device=free.device)
        present[free] = True
        allocator.free_pages = self._sorted = present.nonzero().flatten()

    def _set_out(self, out: Any) -> None:  # noqa: ANN401 - a torch.Tensor
        self._out = out
        self._set_totals(len(out) * self.page_tokens)

    def _set_totals(self, out_tokens: int) -> None:
        """Let SGLang take the pool for smaller by ``out_tokens``; one of the two objects is frozen."""
        for owner, total in self._totals:
            object.__setattr__(owner, _TOTAL, total - out_tokens)

    def _free_to_front(self, slots: Any) -> None:  # noqa: ANN401 - a torch.Tensor
        """Free as SGLang does, and move what it appended, unless it keeps it for later, to the front."""
        allocator = self._allocator
        before = len(allocator.free_pages)
        self._stock_free(slots)
        free = allocator.free_pages
        if len(free) > before:
            allocator.free_pages = self._torch.cat((free[before:], free[:before]))

    def _clear(self) -> None:
        """Empty the pool as SGLang does, with every page back in it."""
        self._set_out(self._out[:0])
        self._stock_clear()
        self._on_clear()


def _explain_totals(scheduler: Any) -> str:  # noqa: ANN401
    missing = [f"{name}.{_TOTAL}" for name in _TOTALS if not hasattr(getattr(scheduler, name, None), _TOTAL)]
    return f"this SGLang's scheduler has no {', '.join(missing)}" if missing else ""
