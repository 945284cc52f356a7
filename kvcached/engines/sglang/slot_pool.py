"""SGLang's KV pool as the cap and the elastic memory want to see one.

One row of memory is one page of the allocator: a slot, or as many as ``--page-size`` says. Scheduler thread only.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from kvcached.engines.sglang.free_slots import FreeSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcached.memory.pool_memory import PoolMemory

SPARE_PAGES = 2
"""What one request needs beyond its own tokens: SGLang admits nothing that fills the pool, and a page is half used."""

ALLOCATIONS = ("alloc", "alloc_extend", "alloc_decode")


def explain_scheduler(scheduler: Any) -> str:  # noqa: ANN401 - SGLang's scheduler
    """Return which of the scheduler's options lets it count on free slots in a way not known here; ``""`` if none."""
    args = scheduler.server_args
    if getattr(args, "disaggregation_mode", "null") not in ("null", None):
        return "with prefill and decode disaggregated, the pool cannot be capped"
    if getattr(args, "speculative_algorithm", None) is not None:
        return "with speculative decoding, the pool cannot be capped"
    if getattr(args, "dllm_algorithm", None) is not None:
        return "with a diffusion language model, the pool cannot be capped"
    if not isinstance(getattr(scheduler, "max_req_len", None), int):
        return "this SGLang's scheduler does not say how long a request can be"
    if not hasattr(scheduler, "chunked_req"):
        return "this SGLang's scheduler does not say which request it has in chunks"
    return ""


class SlotPool:
    """The pool of one scheduler, as ``kvcached.capacity.BlockPool`` and as ``kvcached.memory.elastic.FreeRows``."""

    def __init__(
        self,
        scheduler: Any,  # noqa: ANN401 - SGLang's scheduler
        memory: PoolMemory,
        active_tokens: Callable[[], int],
        on_clear: Callable[[], None],
    ) -> None:
        """Adapt the pool of ``scheduler``; ``active_tokens`` counts those of requests.

        ``on_clear`` is called after SGLang emptied its pool, as its own flush does: nothing is withheld any more then.
        Raises :class:`UnsupportedPoolError` before anything was changed.
        """
        self._slots = FreeSlots(scheduler, on_clear)
        self._scheduler = scheduler
        self._memory = memory
        self._active_tokens = active_tokens
        self._page_tokens = self._slots.page_tokens
        self._pages = int(scheduler.token_to_kv_pool_allocator.size) // self._page_tokens
        if memory.can_return:
            self._follow_allocations(scheduler.token_to_kv_pool_allocator)

    # tokens, for the cap

    def pool_tokens(self) -> int:
        """Return how many tokens fit into the pool in all."""
        return self._pages * self._page_tokens

    def floor_tokens(self) -> int:
        """Return what one longest request needs."""
        pages = -(-int(self._scheduler.max_req_len) // self._page_tokens) + SPARE_PAGES
        return pages * self._page_tokens

    def free_tokens(self) -> int:
        """Return how many free tokens may be withheld."""
        return max(self._slots.free_tokens() - self._promised_tokens(), 0)

    def withheld_tokens(self) -> int:
        """Return how many tokens are withheld."""
        return self._slots.out_pages * self._page_tokens

    def withhold(self, tokens: int) -> int:
        """Take pages out of the pool, and offer their memory."""
        pages = min(-(-tokens // self._page_tokens), self.free_tokens() // self._page_tokens)
        taken = self._slots.take_out(pages)
        self._memory.offer(taken)
        return len(taken) * self._page_tokens

    def restore(self, tokens: int) -> int:
        """Put pages back into the pool; their memory comes back when it is written."""
        return self._slots.put_back(tokens // self._page_tokens) * self._page_tokens

    # rows, for elastic memory

    def free_rows(self) -> int:
        """Return how many pages requests could be given without any eviction."""
        return self._slots.free_tokens() // self._page_tokens

    def active_rows(self) -> int:
        """Return how many pages requests hold."""
        return self._active_tokens() // self._page_tokens

    def withheld_rows(self) -> int:
        """Return how many pages are withheld."""
        return self._slots.out_pages

    def rows_after(self, keep: int) -> Iterable[int]:
        """Return the free pages but the ``keep`` that requests get first."""
        return self._slots.free_pages()[keep:]

    def reuse_newest_first(self) -> None:
        """Let requests get what was freed last, so that the pages behind a load's peak are never touched.

        That is how SGLang's allocator of larger pages does it; the one of single slots goes through the whole pool.
        """
        self._slots.reuse_newest_first()

    def _promised_tokens(self) -> int:
        """Return what SGLang counts on: it ends if the rest of a prompt that it has begun with does not fit.

        The chunks of one prompt come before any decoding, but for a token of each running request with each of them.
        """
        request = self._scheduler.chunked_req
        if request is None:
            return 0
        prompt = len(request.origin_input_ids) + len(request.output_ids)
        chunk = max(int(getattr(self._scheduler, "chunked_prefill_size", None) or prompt), 1)
        running = getattr(self._scheduler, "running_batch", None)
        beside = len(running.reqs) if running is not None else 0
        return prompt + (beside + 1) * (prompt // chunk + 2) * self._page_tokens

    def _follow_allocations(self, allocator: Any) -> None:  # noqa: ANN401 - SGLang's allocator
        """Tell the memory which pages requests get."""
        unique = importlib.import_module("torch").unique
        for name in ALLOCATIONS:
            if hasattr(allocator, name):
                setattr(allocator, name, self._followed(getattr(allocator, name), unique))

    def _followed(self, allocate: Callable[..., Any], unique: Callable[[Any], Any]) -> Callable[..., Any]:
        memory, page_tokens = self._memory, self._page_tokens

        @functools.wraps(allocate)
        def followed(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - SGLang's, passed on as it is
            slots = allocate(*args, **named)
            if memory.follows_taking and slots is not None:
                memory.take((slots if page_tokens == 1 else unique(slots // page_tokens)).tolist())
            return slots

        return followed
