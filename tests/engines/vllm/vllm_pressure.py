"""Load on an engine core in the test's own process, while its bounds change between any two steps."""

# ruff: noqa: ANN401 - vLLM's objects have no types here

from __future__ import annotations

import contextlib
import ctypes
import random
from typing import TYPE_CHECKING, Any

import vllm_cores as cores
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm_models import VOCABULARY

from kvcached.engines.vllm import engine_core_hooks as hooks
from kvcached.engines.vllm import kv_tensors
from kvcached.memory.madvise import PAGE_BYTES, pages_inside
from kvcached.memory.pool_memory import PoolMemory
from kvcached.memory.regions import Region, covering_pages, runs_of
from kvcached.values import UNLIMITED, Bound, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Answer = tuple[list[int], list[float]]

PREFIXES = 8
RUNNING = 24
PROT_NONE, PROT_READ_WRITE = 0, 3


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of 70 to 300 tokens over a few prefixes of their own."""
    draw = random.Random(seed)
    prefixes = [draw.choices(range(3, VOCABULARY), k=draw.choice([64, 128, 200])) for _ in range(PREFIXES)]
    return [draw.choice(prefixes) + draw.choices(range(3, VOCABULARY), k=draw.randrange(6, 100)) for _ in range(count)]


def answer(
    core: Any, prompts: Sequence[list[int]], max_tokens: int, between: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Serve the prompts, up to ``RUNNING`` at a time; return the tokens and log probabilities of each.

    ``between`` is called after every step.
    """
    answers: list[Answer] = [([], []) for _ in prompts]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=1)
    waiting, running = list(enumerate(prompts)), 0
    while waiting or core.scheduler.has_requests():
        while waiting and running < RUNNING:
            number, token_ids = waiting.pop(0)
            running += 1
            fields = dict.fromkeys(EngineCoreRequest.__struct_fields__[:9])
            fields |= {"request_id": str(number), "prompt_token_ids": token_ids, "sampling_params": sampling}
            request, wave = core.preprocess_add_request(EngineCoreRequest(**fields | {"arrival_time": 0.0}))
            core.add_request(request, wave)
        for outputs in (cores.step(core) or {}).values():
            for output in outputs.outputs:
                tokens, logprobs = answers[int(output.request_id)]
                tokens += output.new_token_ids
                logprobs += [float(each[0]) for each in output.new_logprobs.logprobs]
                running -= output.finish_reason is not None
        between()
    return answers


class Bounds:
    """Changes limit and cap of one engine core, as a publication would."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._inproc = core.__dict__[hooks._GOVERNOR]
        self.governor = self._inproc._governor
        self.bounded = self.governor._bounded
        self._revisions = dict.fromkeys(Bound, 0)

    def publish(self, tokens: int, bound: Bound) -> None:
        """Let the next step find an update."""
        self._revisions[bound] += 1
        with self._inproc._lock:
            self.bounded.policy.update(Update(self._revisions[bound], tokens, bound))

    def settle(self) -> Any:
        """Do what the engine's loop does until nothing is left to do; return the report."""
        self._inproc._drain()
        return self.bounded.policy.report()

    def set(self, tokens: int, bound: Bound) -> Any:
        """Publish and settle."""
        self.publish(tokens, bound)
        return self.settle()

    def toggle(self, draw: random.Random) -> None:
        """Publish anything, or nothing, at random."""
        pool, floor = self.bounded.capped.pool_tokens(), self.bounded.capped.floor_tokens()
        if draw.random() < 0.4:
            self.publish(draw.choice([UNLIMITED, pool // 2, floor, floor, draw.randrange(floor, pool)]), Bound.CAP)
        if draw.random() < 0.4:
            self.publish(draw.choice([UNLIMITED, 0, 0, 100, 512, pool // 4]), Bound.LIMIT)


@contextlib.contextmanager
def unreadable_when_returned(core: Any, monkeypatch: Any) -> Iterator[list[int]]:
    """Let returned blocks be unreadable until they are handed out: whoever touches one is killed by SIGSEGV.

    Gives a list to which the number of blocks of each return is added.
    """
    blocks = cores.pool_of(core).num_gpu_blocks
    worker = core.model_executor.driver_worker
    found, obstacle = kv_tensors.find_regions(worker, blocks)
    assert not obstacle
    regions = [Region(*each) for each in found]
    libc = ctypes.CDLL(None, use_errno=True)
    returned: list[int] = []
    return_rows, take = kv_tensors.return_rows, PoolMemory.take

    def protect(start: int, stop: int, access: int) -> None:
        assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), access) == 0

    def protecting_return(where: Any, runs: list[tuple[int, int]]) -> tuple[int, str]:
        done = return_rows(where, runs)
        for region in regions:
            for start, stop in pages_inside(region, runs, PAGE_BYTES):
                protect(start, stop, PROT_NONE)
        returned.append(sum(end - first for first, end in runs))
        return done

    def readable(rows: Iterable[int]) -> None:
        for run in runs_of(rows):
            for region in regions:
                protect(*covering_pages(region, run, PAGE_BYTES), PROT_READ_WRITE)

    def unprotecting_take(self: PoolMemory, rows: Iterable[int]) -> None:
        rows = list(rows)
        readable(rows)
        take(self, rows)

    monkeypatch.setattr(kv_tensors, "return_rows", protecting_return)
    monkeypatch.setattr(PoolMemory, "take", unprotecting_take)
    try:
        yield returned
    finally:
        monkeypatch.undo()
        readable(range(blocks))
