"""A vLLM plugin of the tests: compares the plugin's count with a full scan after every step, inside the engine core.

The first failures and some counts are written to ``$POOL_CHECKER_REPORT.<pid>`` at each turn of the idle loop.
"""

# ruff: noqa: ANN401 - vLLM's objects have no types here

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.core import EngineCore, EngineCoreProc

from kvcached.engines.vllm import register as register_kvcached

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_FAILURES = 20


class Checker:
    """What was seen in one engine core."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.watched = False

    def expect(self, truth: object, what: str) -> None:
        """Note ``what`` as a failure unless ``truth`` holds."""
        if not truth and len(self.failures) < MOST_FAILURES:
            self.failures.append(what)

    def watch(self, engine: Any, idle: Any) -> None:
        """See every block that is evicted and every request that is preempted from here on."""
        if self.watched:
            return
        self.watched = True
        pool, scheduler = idle._pool, engine.scheduler
        evict, preempt = idle._evict_blocks, scheduler._preempt_request

        def checked_evict(block_ids: list[int]) -> None:
            self.counts["evicted_blocks"] += len(block_ids)
            used = [each for each in block_ids if pool.blocks[each].ref_cnt]
            self.expect(not used, f"used blocks evicted: {used}")
            evict(block_ids)

        def counted_preempt(*args: Any, **kwargs: Any) -> Any:
            self.counts["preemptions"] += 1
            return preempt(*args, **kwargs)

        idle._evict_blocks = checked_evict
        scheduler._preempt_request = counted_preempt

    def scan(self, engine: Any) -> None:
        """Check the whole pool."""
        governor = engine.__dict__.get("_kvcached_governor")
        governor = getattr(governor, "_governor", governor)
        bounded = getattr(governor, "_bounded", None)
        if bounded is None:
            self.expect(truth=False, what="the engine core is not governed")
            return
        idle, policy = bounded.idle, bounded.policy
        self.watch(engine, idle)
        queue = idle._pool.free_block_queue
        blocks = queue.get_all_free_blocks()
        ids = {block.block_id for block in blocks}
        cached = sum(block.block_hash is not None for block in blocks)
        free = {block.block_id for block in idle._pool.blocks if block.ref_cnt == 0 and not block.is_null}
        self.expect(len(ids) == len(blocks) == queue.num_free_blocks, "a block is in the free queue twice")
        self.expect(ids == free, f"free blocks outside the queue, or used ones in it: {sorted(ids ^ free)}")
        self.expect(idle.count == cached, f"counted {idle.count} idle blocks, found {cached}")
        order = [block.block_hash is not None for block in blocks]
        self.expect(order == sorted(order), "an uncached block stands behind a cached one")
        cache, limit = bounded.cache, policy.limit_tokens
        if limit >= 0 and not policy.draining:
            bound = max(limit, cache.block_tokens) if limit else 0
            self.expect(cache.idle_tokens() <= bound, f"{cache.idle_tokens()} idle tokens under the limit {limit}")
        self.counts["scans"] += 1

    def report(self) -> None:
        """Write what was seen so far."""
        path = Path(f"{os.environ['POOL_CHECKER_REPORT']}.{os.getpid()}")
        draft = Path(f"{path}.draft")
        draft.write_text(json.dumps({"counts": self.counts, "failures": self.failures}))
        draft.rename(path)


CHECKER = Checker()


def register() -> None:
    """Install our hooks around those of the plugin under test."""
    if hasattr(EngineCore.post_step, "pool_checker"):
        return
    register_kvcached()
    _follow(EngineCore, "post_step", _after_step)
    _follow(EngineCore, "execute_dummy_batch", _after_dummy_batch)
    _follow(EngineCoreProc, "_notify_idle_state_callbacks", _after_idle_turn)


def _after_step(engine: Any) -> None:
    CHECKER.counts["steps"] += 1
    CHECKER.scan(engine)
    if not hasattr(engine, "input_queue"):
        CHECKER.report()


def _after_dummy_batch(engine: Any) -> None:  # noqa: ARG001 - the shape of a follower
    CHECKER.counts["dummy_batches"] += 1


def _after_idle_turn(engine: Any) -> None:
    CHECKER.counts["idle_turns"] += 1
    CHECKER.scan(engine)
    CHECKER.report()


def _follow(owner: type[Any], name: str, then: Callable[[Any], None]) -> None:
    stock = getattr(owner, name)

    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        then(self)
        return result

    followed.pool_checker = True  # type: ignore[attr-defined]
    setattr(owner, name, followed)
