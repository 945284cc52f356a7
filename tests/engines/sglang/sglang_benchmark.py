"""What the plugin costs SGLang and how fast a limit is applied; run by ``scripts/bench-sglang``.

All figures come from real parts: SGLang's own hook registry, radix trees and servers, on the CPU. Ratios and counts
carry over to other machines, milliseconds do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang_caches import Cached, build
from sglang_model import write_model
from sglang_placed import place, start_second_rank
from sglang_pools import Capped, heads_pool, tensors_of
from sglang_server import Server, write_probe_entry_point

from kvcached.control import set_prefix_cache_retention_limit
from kvcached.engines.sglang.cache import RadixPrefixCache
from kvcached.engines.sglang.rank_messages import CHUNK_TOKENS
from kvcached.policy import RetentionPolicy
from kvcached.values import Update

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.sglang.scheduler_hooks import SchedulerHooks

LEAVES = 1000
LEAF_TOKENS = 100
ROUNDS = 5
CALLS = 200_000
PUBLICATIONS = 40
GIB = 1 << 30
CAP_SLOTS = 65536
"""Of 16 KiB each: 1 GiB."""


class Receiver:
    """Replaces SGLang's request receiver and does nothing: what is measured is the hook."""

    def _broadcast_reqs_across_ranks(self, recv_reqs: list[Any], local_reqs: object = None) -> list[Any]:  # noqa: ARG002
        return recv_reqs


class Scheduler:
    """Replaces SGLang's scheduler and does nothing."""

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """Process nothing."""


class PlainReceiver(Receiver):
    """The same without hooks."""

    def _broadcast_reqs_across_ranks(self, recv_reqs: list[Any], local_reqs: object = None) -> list[Any]:  # noqa: ARG002
        return recv_reqs


class PlainScheduler(Scheduler):
    """The same without hooks."""

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """Process nothing."""


def filled(kind: str) -> Cached:
    """Return a cache of that kind with 100,000 idle tokens in 1,000 leaves."""
    cached = build(kind, size=131072)
    for leaf in range(LEAVES):
        cached.insert([leaf * 1000 + step for step in range(LEAF_TOKENS)])
    return cached


def measure_big_drop(kind: str) -> dict[str, Any]:
    """Compare a drop from 100,000 idle tokens to 0 with the cache's own eviction of everything."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: PLC0415

    own, total, longest = [], [], []
    for _ in range(ROUNDS):
        tree = filled(kind).tree_cache
        own.append(_ms(lambda tree=tree: tree.evict(EvictParams(num_tokens=tree.evictable_size()))))
        policy = RetentionPolicy(RadixPrefixCache(filled(kind)), -1, chunk_tokens=CHUNK_TOKENS)
        holds = [_ms(lambda policy=policy: policy.update(Update(1, 0)))]
        while policy.draining:
            holds.append(_ms(policy.on_step))
        total.append(sum(holds))
        longest.append(max(holds))
    return {
        "cache": kind,
        "own_eviction_ms": round(statistics.median(own), 2),
        "in_chunks_ms": round(statistics.median(total), 2),
        "ratio": round(statistics.median(total) / statistics.median(own), 2),
        "longest_hold_ms": round(statistics.median(longest), 2),
        "chunks": -(-LEAVES * LEAF_TOKENS // CHUNK_TOKENS),
    }


def measure_hooks(kind: str, folder: Path) -> dict[str, Any]:
    """Measure what the two hooks of each iteration cost with nothing to do, on a source rank and on another one."""
    found = {"cache": kind}
    for rank, source in (("source", True), ("other", False)):
        hooks = _placed_hooks(kind, folder / f"{kind}-{rank}", source=source)
        _install_on_stand_ins(hooks)
        plain, hooked = [], []
        for _ in range(ROUNDS):
            plain.append(_iteration_ns(PlainReceiver(), PlainScheduler()))
            hooked.append(_iteration_ns(Receiver(), Scheduler()))
        found[f"{rank}_rank_ns"] = round(min(hooked) - min(plain))
    return found


def _iteration_ns(receiver: Receiver, scheduler: Scheduler) -> float:
    requests: list[Any] = []
    began = time.thread_time_ns()  # not the wall: other processes' time is none of the hooks'
    for _ in range(CALLS):
        scheduler.process_input_requests(receiver._broadcast_reqs_across_ranks(requests, requests))
    return (time.thread_time_ns() - began) / CALLS


def _install_on_stand_ins(hooks: SchedulerHooks) -> None:
    """Let SGLang's registry wrap the stand-ins as it wraps the real ones, again for each set of hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    for owner, name, hook, kind in (
        (Receiver, "_broadcast_reqs_across_ranks", hooks.announce, HookType.BEFORE),
        (Scheduler, "process_input_requests", hooks.end_iteration, HookType.AFTER),
    ):
        method = getattr(owner, name)
        setattr(owner, name, getattr(method, "__wrapped__", method))
        target = f"{__name__}.{owner.__name__}.{name}"
        HookRegistry._hooks.pop(target, None)
        HookRegistry._patched.discard(target)
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()


def _placed_hooks(kind: str, ledger_dir: Path, *, source: bool) -> SchedulerHooks:
    """Return hooks that believe to be in a scheduler of two tensor-parallel ranks, started with a limit."""
    cached = build(kind)
    cached.insert(list(range(1000)))
    placed = place(cached, ledger_dir, source=source)
    if source:
        placed.iterate()
    else:
        start_second_rank(placed, 16000)
    return placed.hooks


def measure_cap(page: int) -> dict[str, Any]:
    """Measure, on a pool of 1 GiB, a cap to a quarter until the memory is back, and what taking it again costs.

    In CPU time of the thread, the kernel's included: other processes' time is none of the cap's.
    """
    pool = heads_pool(CAP_SLOTS, page, layers=4)
    capped = Capped(pool, page)
    totals, longest, given = [], [], 0
    for _ in range(ROUNDS):
        holds = [_cpu_ms(lambda: capped.update(CAP_SLOTS // 4))]
        while capped.policy.draining:
            holds.append(_cpu_ms(capped.policy.on_step))
        totals.append(sum(holds))
        longest.append(max(holds))
        given = capped.memory.figures().returned_bytes
        capped.cap(-1)
        again = _cpu_ms(lambda: [tensor.fill_(1.0) for tensor in tensors_of(pool)])
        resident = _cpu_ms(lambda: [tensor.fill_(2.0) for tensor in tensors_of(pool)])
        capped.allocator.free(capped.allocator.alloc(CAP_SLOTS))  # all rows are taken, and free again
    return {
        "page": page,
        "returned_mib": given >> 20,
        "back_ms_per_gib": round(statistics.median(totals) * GIB / given, 1),
        "longest_hold_ms": round(statistics.median(longest), 2),
        "worst_hold_ms": round(max(longest), 2),
        "taken_again_ms_per_gib": round((again - resident) * GIB / given),
    }


def measure_latency(folder: Path, *options: str) -> dict[str, Any]:
    """Measure, on an idle server of two ranks, how long a publication takes until both ranks applied it."""
    model = folder / "model"
    model.mkdir()
    (folder / "entry-point").mkdir()
    probes = write_probe_entry_point(folder / "entry-point")
    server = Server(
        write_model(model, weights=False), folder / "server", probes, ("--tp-size", "2", *options), probes=("timing",)
    )
    server.start()
    try:
        published = {}
        for index in range(PUBLICATIONS):
            time.sleep(0.05 + 0.003 * (index % 7))
            began = time.monotonic_ns()
            result = set_prefix_cache_retention_limit(index, instance_name="under-test", ledger_dir=server.ledger_dir)
            published[result.revision] = (began, time.monotonic_ns())
        time.sleep(1.5)
        records = server.records()
    finally:
        server.stop()
    return _summarize(published, [records[0, 0, rank] for rank in (0, 1)])


def _summarize(published: dict[int, tuple[int, int]], ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Take the later of the two ranks for each publication."""
    milliseconds, iterations = [], []
    for applied in zip(*ranks, strict=True):
        began, ended = published[applied[0]["revision"]]
        milliseconds.append((max(each["at"] for each in applied) - began) / 1e6)
        iterations.append(max(1 + sum(ended < end < each["at"] for end in each["ends"]) for each in applied))
    return {
        "publications": len(milliseconds),
        "iterations": {"median": statistics.median(iterations), "longest": max(iterations)},
        "ms": {"median": round(statistics.median(milliseconds), 2), "longest": round(max(milliseconds), 2)},
    }


def _ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def _cpu_ms(call: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - began) / 1e6


def report(**figures: object) -> None:
    """Print a JSON object on a line of its own."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print one JSON object per measurement."""
    parser = argparse.ArgumentParser(prog="scripts/bench-sglang")
    parser.add_argument("--no-server", action="store_true", help="leave out what needs a running server")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads stall on small copies
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("unified-rust", "unified-python"):
            report(hooks_per_iteration=measure_hooks(kind, folder))
            report(drop_to_0=measure_big_drop(kind))
        for page in (1, 16):
            report(cap_to_a_quarter=measure_cap(page))
        if not options.no_server:
            for label, more in (("idle", ()), ("asleep", ("--sleep-on-idle",))):
                (folder / label).mkdir()
                figures = measure_latency(folder / label, *more)
                report(publication_to_applied={"server": label, **figures})


if __name__ == "__main__":
    main()
