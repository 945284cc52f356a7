"""Figures of the vLLM plugin, each beside the stock engine or per block, all of one run. See ``scripts/bench-vllm``."""

# ruff: noqa: ANN401 - vLLM's objects have no types here

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
import timeit
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_models import PLAIN, WIDE, write_config
from vllm_serving import application, descendants, engine_environment, process_title, set_limit, with_plugin

from kvcached.control import set_kv_capacity_limit
from kvcached.ledger import binding
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.replicas import find_replicas
from kvcached.ledger.subscription import Subscription
from kvcached.values import UNLIMITED, Identity, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from vllm_serving import Application

    from kvcached.engines.vllm.idle_blocks import IdleBlocks

ROUNDS = 9
PUBLICATIONS = 1000
IDLE_S = 10.0
SERVING_PAIRS = 120
SERVING_LIMIT = 4000
CAPPED_BLOCKS = 2048
GIB = 1 << 30


def say(what: str, value: str) -> None:
    """Print one line of the result."""
    print(f"{what:66} {value}", flush=True)


# The pool alone ---------------------------------------------------------------------------------------------------


def make_pool(blocks: int, *, events: bool = False) -> Any:
    """Return vLLM's real pool."""
    from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415 - slow

    return BlockPool(blocks, enable_caching=True, hash_block_size=16, enable_kv_cache_events=events)


def make_hashes(count: int) -> list[Any]:
    """Return distinct block hashes of group 0."""
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id  # noqa: PLC0415 - slow

    return [make_block_hash_with_group_id(BlockHash(each.to_bytes(32, "big")), 0) for each in range(count)]


def life_ns(pool: Any, batch: int, hashes: list[Any]) -> float:
    """Return the ns per block from allocation (dropping an old hash) over caching, release and a hit to release."""
    supply = iter(hashes)
    began = time.perf_counter_ns()
    for _ in range(len(hashes) // batch):
        blocks = pool.get_new_blocks(batch)
        for block in blocks:
            pool._insert_block_hash(next(supply), block, 16)
        pool.free_blocks(blocks)
        pool.touch(blocks)
        pool.free_blocks(blocks)
    return (time.perf_counter_ns() - began) / len(hashes)


def bench_life(attach: Callable[[Any], IdleBlocks]) -> None:
    """Compare a block's whole life with and without our bookkeeping."""
    hashes = make_hashes(20_000)
    for batch in (1, 4, 16, 64):
        stock, ours = make_pool(10_000), make_pool(10_000)
        attach(ours)
        pairs = [(life_ns(stock, batch, hashes), life_ns(ours, batch, hashes)) for _ in range(ROUNDS)]
        fastest = [min(side) for side in zip(*pairs, strict=True)]
        ratio = statistics.median(ours / stock for stock, ours in pairs)
        figures = f"{fastest[0]:.0f} ns -> {fastest[1]:.0f} ns, median ratio {ratio:.3f}"
        say(f"a block's whole life, {batch} per request, stock -> ours", figures)


def filled_pool(blocks: int, *, events: bool) -> Any:
    """Return a pool with this many idle cached blocks."""
    pool = make_pool(blocks + 1, events=events)
    taken = pool.get_new_blocks(blocks)
    for block, block_hash in zip(taken, make_hashes(blocks), strict=True):
        pool._insert_block_hash(block_hash, block, 16)
    pool.free_blocks(reversed(taken))
    return pool


def bench_eviction(attach: Callable[[Any], IdleBlocks], chunk: int) -> None:
    """Measure the eviction of all blocks, chunk by chunk as the engine does it."""
    for blocks, events in ((10_000, False), (100_000, False), (1_000_000, False), (100_000, True)):
        idle = attach(filled_pool(blocks, events=events))
        holds = []
        while idle.count:
            began = time.perf_counter_ns()
            idle.evict(chunk)
            holds.append(time.perf_counter_ns() - began)
        per_block = sum(holds) / blocks / 1000
        figures = f"{per_block:.2f} us per block, longest hold {max(holds) / 1e6:.2f} ms"
        say(f"evict {blocks:,} idle blocks{', KV events on' if events else ''}", figures)


def settings_of(ledger_dir: str, elastic_after_s: float | None = None) -> Any:
    """Return the settings of an engine that nobody has bounded yet."""
    from kvcached.settings import read_settings  # noqa: PLC0415

    read = read_settings("vllm", {"KVCACHED_LEDGER_DIR": ledger_dir})
    return replace(read, elastic_after_s=elastic_after_s)


def bench_step(*, elastic: bool = False) -> None:
    """Measure what an engine step pays while nothing was published and no request comes or goes."""
    from kvcached.engines.vllm.alarm import Alarm  # noqa: PLC0415
    from kvcached.engines.vllm.bounded_pool import BoundedPool  # noqa: PLC0415
    from kvcached.engines.vllm.governor import Governor  # noqa: PLC0415
    from kvcached.engines.vllm.worker_memory import WorkerMemory  # noqa: PLC0415
    from kvcached.memory.regions import PoolShape  # noqa: PLC0415
    from kvcached.memory.returning import LocalTransport  # noqa: PLC0415

    transport: Any = LocalTransport([])
    workers = WorkerMemory(PoolShape(1001, 4096), "")
    identity = Identity("bench", "vllm", "0", 0, 1, 1, UNLIMITED, 16)
    with tempfile.TemporaryDirectory() as directory:
        settings = settings_of(directory, 5.0 if elastic else None)
        bounded = BoundedPool(filled_pool(1000, events=False), [16], 1, workers, transport, settings, print)
        subscription = Subscription(identity, ["cpu-0"], directory)
        subscription.start()
        alarm = Alarm(gc.collect)
        governor = Governor(subscription, bounded, alarm, publish_events=gc.collect, wake=gc.collect)
        governor.on_step()
        turns = [timeit.timeit(governor.on_step, number=20_000) / 20_000 for _ in range(ROUNDS)]
        subscription.close()
    what = "an engine step with nothing to do for us" + (", elastic" if elastic else "")
    say(what, f"{min(turns) * 1e9:.0f} ns")


def bench_pool() -> None:
    """Everything that needs no engine."""
    from kvcached.engines.vllm.idle_blocks import IdleBlocks  # noqa: PLC0415
    from kvcached.engines.vllm.prefix_cache import CHUNK_BLOCKS  # noqa: PLC0415

    gc.collect()
    gc.freeze()  # as vLLM does once its engine is built
    bench_life(IdleBlocks)
    bench_eviction(IdleBlocks, CHUNK_BLOCKS)
    bench_step()
    bench_step(elastic=True)


# A real engine ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch(config: dict[str, Any] = PLAIN) -> Iterator[tuple[Path, Path]]:
    """Give a directory and a model in it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        yield directory, write_config(config, directory / "model")


def publish_raw(ledger_dir: Path, gaps_s: Callable[[], float]) -> dict[int, int]:
    """Publish often, by compare-and-swap and doorbell alone; return when each revision was published."""
    began: dict[int, int] = {}
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        (replica,) = find_replicas(directory.open_all(), "bench")
        (member,) = replica.members
        first = member.slot.desired.revision + 1
        for revision in range(first, first + PUBLICATIONS):
            time.sleep(gaps_s())
            began[revision] = time.monotonic_ns()
            member.ledger.handle.raise_desired(member.index, member.slot.incarnation, Update(revision, revision % 2))
            member.ledger.handle.ring(binding.PUBLISHED)
    return began


def hear(ledger_dir: str, results: Connection) -> None:
    """Stand for an engine with nothing in it: one thread hears the doorbell, another waits for it at a queue."""
    heard: queue.Queue[int] = queue.Queue()  # the kind that vLLM waits at
    with LedgerDirectory(ledger_dir, writable=False) as directory:
        handle = directory.open("cpu-0").handle
        first = handle.bell(binding.PUBLISHED)

        def listen() -> None:
            seen = first
            while seen < first + PUBLICATIONS:
                handle.wait(binding.PUBLISHED, seen, time.monotonic() + 1)
                if handle.bell(binding.PUBLISHED) != seen:
                    seen = handle.bell(binding.PUBLISHED)
                    heard.put(seen - first)

        thread = threading.Thread(target=listen)
        thread.start()
        results.send(None)
        done = {}
        while (number := heard.get()) < PUBLICATIONS:
            done[number] = time.monotonic_ns()
        thread.join()
    results.send(done)


def bench_wakes() -> list[float]:
    """Measure two bare wakes, process to thread to thread: no idle engine with a watcher can be reached faster."""
    draw, began = random.Random(1), {}
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as name, LedgerDirectory(name, writable=True) as directory:
        directory.create("cpu-0")
        handle = directory.open("cpu-0").handle
        listener = multiprocessing.get_context("fork").Process(target=hear, args=(name, theirs))
        listener.start()
        ours.recv()
        for number in range(1, PUBLICATIONS + 1):
            time.sleep(draw.uniform(0.050, 0.060))
            began[number] = time.monotonic_ns()
            handle.ring(binding.PUBLISHED)
        done = ours.recv()
        listener.join()
    return sorted((done[each] - began[each]) / 1000 for each in done)


def prefer(pid: int) -> None:
    """Let all threads of a process run before everything else on the machine (needs root)."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(10))


def bench_latency(*, realtime: bool = False) -> None:
    """Measure from before the compare-and-swap of a publisher to the end of the engine's turn; the engine idles."""
    draw, evicted_us = random.Random(1), 0.0
    print("seed 1")
    with scratch() as (directory, model):
        ledger_dir, report = directory / "ledger", directory / "clock.json"
        environment = engine_environment(ledger_dir, "bench", PUBLICATION_CLOCK_REPORT=str(report))
        environment = with_plugin(environment, "publication_clock", directory)
        with application(model, directory / "log", environment) as running:
            running.cached_tokens(1)
            if realtime:
                prefer(os.getpid())
                prefer(core_pid(running))
            time.sleep(1.0)
            for name, gap in (("1 to 20 ms apart", (0.001, 0.020)), ("50 to 60 ms apart", (0.050, 0.060))):
                began = publish_raw(ledger_dir, lambda gap=gap: draw.uniform(*gap))
                time.sleep(0.5)
                done = {int(key): value for key, value in json.loads(report.read_text()).items()}
                for position, stage in enumerate(("core woken", "its turn begun", "evicted", "acknowledged")):
                    taken = sorted((done[each][position] - began[each]) / 1000 for each in began if each in done)
                    median_us = say_times(f"publication -> {stage}, engine idle, {name}", taken)
                    if stage == "evicted":
                        evicted_us = median_us
    bare_us = say_times("two bare wakes, process to thread to thread, 50 to 60 ms apart", bench_wakes())
    say("publication -> evicted / two bare wakes, medians", f"{evicted_us / bare_us:.2f}")


def say_times(what: str, taken: list[float]) -> float:
    """Print the percentiles of sorted microseconds; return the median."""
    cuts = [taken[int(len(taken) * share)] for share in (0.5, 0.9, 0.99)]
    figures = f"p50 {cuts[0]:.0f}, p90 {cuts[1]:.0f}, p99 {cuts[2]:.0f}, max {taken[-1]:.0f} us"
    say(f"{what} ({len(taken)})", figures)
    return cuts[0]


def core_pid(running: Application) -> int:
    """Return the process id of the engine core."""
    (core,) = (pid for pid in descendants(running.process.pid) if process_title(pid).startswith("VLLM::EngineCor"))
    return core


def core_cpu_s(running: Application) -> float:
    """Return the CPU seconds that the engine core took so far."""
    fields = Path(f"/proc/{core_pid(running)}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bench_serving() -> None:
    """Compare tokens per second and the CPU of an idle engine core, with the plugin and without.

    Both engines stay, and work in turns on the same batches, so that a busy machine slows both alike. Hits are equal
    on both sides, or it would be they that are compared: prompts with shared prefixes are served without a limit, and
    prompts that share nothing under a limit that always evicts.
    """
    with scratch() as (directory, model), contextlib.ExitStack() as stack:
        stock, ours = (
            stack.enter_context(
                application(
                    model,
                    directory / f"log-{disabled}",
                    engine_environment(directory / "ledger", "bench", KVCACHED_DISABLE=disabled),
                    program="throughput.py",
                )
            )
            for disabled in ("1", "")
        )
        for running in (stock, ours):
            running.cached_tokens(1)
        compare_serving("prompts with shared prefixes, no limit", stock, ours, sign=1)
        set_limit(SERVING_LIMIT, "bench", directory / "ledger")
        compare_serving(f"prompts without, limit {SERVING_LIMIT:,}", stock, ours, sign=-1)
        set_limit(-1, "bench", directory / "ledger")
        before = [core_cpu_s(running) for running in (stock, ours)]
        time.sleep(IDLE_S)
        shares = [(core_cpu_s(r) - cpu_s) / IDLE_S for r, cpu_s in zip((stock, ours), before, strict=True)]
    say(f"CPU of the idle engine core over {IDLE_S:.0f} s, without -> with", "{:.2%} -> {:.2%}".format(*shares))


def compare_serving(what: str, stock: Application, ours: Application, *, sign: int) -> None:
    """Serve the same batches in turns and compare the tokens per second of each pair."""
    pairs = []
    for seed in range(2, 2 + SERVING_PAIRS):
        if seed % 2:
            stock_speed, our_speed = stock.cached_tokens(sign * seed), ours.cached_tokens(sign * seed)
        else:
            our_speed, stock_speed = ours.cached_tokens(sign * seed), stock.cached_tokens(sign * seed)
        pairs.append((stock_speed, our_speed))
    ratios = sorted(ours / stock for stock, ours in pairs)
    medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    figures = f"{medians[0]:.0f} -> {medians[1]:.0f}, median ratio {quartiles[1]:.3f}"
    figures += f" (half of {len(pairs)} pairs: {quartiles[0]:.3f} to {quartiles[2]:.3f})"
    say(f"tokens per second, {what}, without -> with", figures)


def bench_capacity() -> None:
    """Measure how long a cap takes until the memory is back, what one turn of the engine pays, and a fault later."""
    with scratch(WIDE) as (directory, model):
        os.environ |= {"KVCACHED_LEDGER_DIR": str(directory / "ledger"), "KVCACHED_INSTANCE_NAME": "bench"}
        import vllm_cores as cores  # noqa: PLC0415 - slow
        from vllm_pressure import Bounds  # noqa: PLC0415

        from kvcached.engines.vllm import register  # noqa: PLC0415

        register()
        core = cores.make_core(cores.make_config(model, num_gpu_blocks_override=CAPPED_BLOCKS))
        core.get_supported_tasks()
        bounds = Bounds(core)
        turns: list[float] = []
        time_turns(bounds, turns)
        floor = bounds.bounded.capped.floor_tokens()
        taken = []
        for _ in range(ROUNDS):
            touch_pool(core)
            bounds.bounded.memory.take(range(CAPPED_BLOCKS))  # as if requests had been given all blocks
            began = time.perf_counter()
            result = set_kv_capacity_limit(floor, instance_name="bench", ledger_dir=directory / "ledger", wait=60)
            taken.append((time.perf_counter() - began) / (bounds.bounded.memory.figures().returned_bytes / GIB))
            assert result.applied, result
            set_kv_capacity_limit(UNLIMITED, instance_name="bench", ledger_dir=directory / "ledger", wait=60)
        say("a cap published -> memory back, engine idle, per GiB", f"{statistics.median(taken) * 1e3:.0f} ms")
        turns.sort()
        cuts = [turns[int(len(turns) * share)] * 1e3 for share in (0.5, 0.9, 0.99)]
        figures = "p50 {:.1f}, p90 {:.1f}, p99 {:.1f}".format(*cuts) + f", max {turns[-1] * 1e3:.1f} ms"
        say(f"how long each turn of the engine took meanwhile ({len(turns)})", figures)
        touch_pool(core)
        bounds.bounded.memory.take(range(CAPPED_BLOCKS))
        set_kv_capacity_limit(floor, instance_name="bench", ledger_dir=directory / "ledger", wait=60)
        cold = touch_pool(core)
        warm = min(touch_pool(core) for _ in range(ROUNDS))
        say("memory taken again by writing, beyond writing, per GiB", f"{(cold - warm) * 1e3:.0f} ms")
        core.shutdown()


def time_turns(bounds: Any, turns: list[float]) -> None:
    """Note how long each turn of the governor takes from here on."""
    governor = bounds.governor
    on_idle = governor.on_idle

    def timed_on_idle() -> None:
        began = time.perf_counter()
        on_idle()
        turns.append(time.perf_counter() - began)

    governor.on_idle = timed_on_idle


def touch_pool(core: Any) -> float:
    """Write to all KV tensors; return the seconds per GiB."""
    written = 0
    began = time.perf_counter()
    for tensor in core.model_executor.driver_worker.model_runner.kv_caches:
        tensor.zero_()
        written += tensor.numel() * tensor.element_size()
    return (time.perf_counter() - began) / (written / GIB)


BENCHES: dict[str, Callable[[], None]] = {
    "pool": bench_pool,
    "latency": bench_latency,
    "latency-realtime": lambda: bench_latency(realtime=True),
    "serving": bench_serving,
    "capacity": bench_capacity,
}


def main() -> None:
    """Run the chosen parts."""
    say("load of the machine at the start", " ".join(f"{each:.2f}" for each in os.getloadavg()))
    for name in sys.argv[1:] or ("pool", "latency", "serving", "capacity"):
        BENCHES[name]()
    say("load of the machine at the end", " ".join(f"{each:.2f}" for each in os.getloadavg()))


if __name__ == "__main__":
    main()
