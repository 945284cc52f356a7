"""The way to the memory behind vLLM's blocks: what the workers say of it, and the calls that give it back.

The calls go through the executor in order with the engine's steps: behind all that were handed out before, before all
later ones. So a block that is free now and is used again by the next step is returned first and written then.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcached import guards
from kvcached.engines.vllm import kv_tensors
from kvcached.guards import call_guarded
from kvcached.memory import madvise
from kvcached.memory.regions import PoolShape
from kvcached.memory.returning import Returned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.memory.regions import Run

_log = logging.getLogger(__name__)

ORDERED_EXECUTORS = frozenset({"UniProcExecutor", "MultiprocExecutor"})
"""The executors whose calls are known to be in order with the steps, by the names of their classes and bases."""


class WorkerMemory(NamedTuple):
    """What is known of the KV memory of all workers."""

    shape: PoolShape
    obstacle: str
    """Why it cannot be returned; ``""`` if it can."""


def look_at_workers(engine: Any, blocks: int) -> WorkerMemory:  # noqa: ANN401 - vLLM's EngineCore
    """Ask all workers how large a block is and what stands against returning its memory. Only with no step in flight.

    Never raises: an engine whose workers cannot be asked is capped all the same.
    """
    obstacle = _obstacle_of(engine)

    def unknown(error: Exception) -> WorkerMemory:  # it is only the memory that is not returned then
        _log.info("the workers could not be asked for their KV tensors:", exc_info=error)
        reason = f"its workers cannot be asked ({madvise.name_error(error)})"
        return WorkerMemory(PoolShape(blocks, 0), obstacle or reason)

    return call_guarded(unknown, _ask_workers, engine, blocks, obstacle)


def _ask_workers(engine: Any, blocks: int, obstacle: str) -> WorkerMemory:  # noqa: ANN401
    travel_by_value()
    # No time limit: an executor that gives up on one worker leaves the others' answers to whoever asks next.
    answers = engine.model_executor.collective_rpc(kv_tensors.describe_memory, args=(blocks,))
    row_bytes = [int(answer[0]) for answer in answers]
    regions = max(int(answer[1]) for answer in answers)
    obstacle = obstacle or next((str(answer[2]) for answer in answers if answer[2]), "")
    ranks = len(row_bytes)
    return WorkerMemory(PoolShape(blocks, sum(row_bytes) // ranks, max(regions, 1), ranks), obstacle)


class WorkerTransport:
    """Carries runs of block ids to all workers. Fulfils ``kvcached.memory.returning.Transport``."""

    def __init__(self, engine: Any, blocks: int) -> None:  # noqa: ANN401
        """Reach the workers of ``engine``, whose pool has ``blocks`` blocks."""
        self.may_wait = True
        """Whether no step is in flight, so that an answer is waited for: then nobody else reads it."""
        self._engine = engine
        self._blocks = blocks
        self._first = True
        self._answers: deque[Any] = deque()
        parameters = inspect.signature(engine.model_executor.collective_rpc).parameters
        self._unblocked = {"non_block": True} if "non_block" in parameters else {}

    def send(self, runs: list[Run]) -> None:
        """Let all workers return the memory of ``runs``."""
        arguments = (runs, self._blocks, self._first)
        self._first = False
        # An executor that cannot be reached ends the returns, nothing else.
        self._answers.append(call_guarded(_no_answer, self._call_workers, arguments))

    def replies(self) -> list[Returned]:
        """Return the answers that are there; with ``may_wait`` all of them."""
        found = []
        while self._answers and (self.may_wait or _is_there(self._answers[0])):
            # vLLM has its own ways to learn that a worker is lost.
            found.append(call_guarded(_nothing_returned, _read, self._answers.popleft()))
        return found

    def _call_workers(self, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401 - a list, or vLLM's future of one
        rpc = self._engine.model_executor.collective_rpc
        return rpc(kv_tensors.return_blocks, args=arguments, **self._unblocked)


def _is_there(answer: Any) -> bool:  # noqa: ANN401 - a list, or vLLM's future of one
    return isinstance(answer, list) or bool(answer.done())


def _read(answer: Any) -> Returned:  # noqa: ANN401
    by_rank: Sequence[tuple[int, str]] = answer if isinstance(answer, list) else answer.result()
    returned_bytes = sum(int(rank[0]) for rank in by_rank)
    reason = next((str(rank[1]) for rank in by_rank if rank[1]), "")
    return Returned(returned_bytes, reason)


def _no_answer(error: Exception) -> list[tuple[int, str]]:
    return [(0, madvise.name_error(error))]


def _nothing_returned(error: Exception) -> Returned:
    return Returned(0, madvise.name_error(error))


def _obstacle_of(engine: Any) -> str:  # noqa: ANN401
    """Return what in the engine's configuration stands against returning its memory."""
    config = engine.vllm_config
    connector = getattr(config, "kv_transfer_config", None)
    if connector is not None:
        name = getattr(connector, "kv_connector", None) or "a KV connector"
        return f"{name} may have registered its memory with a network card or another process"
    attention = getattr(config, "attention_config", None)
    if getattr(attention, "hisparse_config", None) is not None:
        return "HiSparse keeps a part of its KV in a pool of the host"
    executor = {each.__name__ for each in type(engine.model_executor).__mro__}
    if not executor & ORDERED_EXECUTORS:
        name = type(engine.model_executor).__name__
        return f"calls of its {name} to the workers are not known to be in order with the steps"
    return ""


def travel_by_value() -> None:
    """Let the functions for the workers be sent as code: a worker's node may have no kvcached, or another release."""
    cloudpickle = importlib.import_module("cloudpickle")
    for module in (guards, madvise, kv_tensors):
        cloudpickle.register_pickle_by_value(module)
