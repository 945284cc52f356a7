"""The cap on real engine cores: blocks are withheld, their memory comes back, and no output changes."""

# ruff: noqa: ANN401 - vLLM's objects have no types here

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import vllm_cores as cores
from vllm_models import HYBRID, WIDE, write_config, write_weights
from vllm_pressure import Bounds, answer, make_prompts, unreadable_when_returned
from vllm_serving import (
    BLOCK_TOKENS,
    HIT_TOKENS,
    descendants,
    engine_environment,
    prompt,
    serving,
    wait_until,
    with_plugin,
)

from kvcached.control import set_kv_capacity_limit
from kvcached.engines.vllm import kv_tensors, register
from kvcached.memory.kernel_figures import anonymous_bytes, minor_faults
from kvcached.values import UNLIMITED, Bound, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vllm_serving import Server

    from kvcached.control import PublicationResult

    MakeCore = Callable[..., Any]

BLOCKS = 512
POOL_TOKENS = (BLOCKS - 1) * BLOCK_TOKENS
QUARTER_TOKENS = POOL_TOKENS // 4
BLOCK_BYTES = 512 << 10
FLOOR_TOKENS = (2048 // BLOCK_TOKENS + 1) * BLOCK_TOKENS
MOST_OF_IT = 0.95
PRESSED_BLOCKS = 160
SEED = 31


@pytest.fixture(scope="module", autouse=True)
def _process() -> Iterator[None]:
    """Put this process under control once, and leave its environment as it was."""
    before = dict(os.environ)
    register()
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def ledger_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a ledger directory of its own."""
    monkeypatch.setenv("KVCACHED_LEDGER_DIR", str(tmp_path / "ledger"))
    monkeypatch.setenv("KVCACHED_INSTANCE_NAME", "capped")
    return tmp_path / "ledger"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with wide KV rows, whose prompts have different outputs."""
    return write_weights(WIDE, tmp_path_factory.mktemp("wide"))


@pytest.fixture
def make_core(wide: Path) -> Iterator[MakeCore]:
    """Build engine cores of the wide model, and shut them down at the end."""
    made = []

    def make(model: Path = wide, **options: Any) -> Any:
        chosen = {"num_gpu_blocks_override": BLOCKS, "load_format": "auto"} | options
        core = cores.make_core(cores.make_config(model, **chosen))
        made.append(core)
        core.get_supported_tasks()  # as LLM does, once the engine is built
        return core

    yield make
    for core in made:
        core.shutdown()


def withheld(bounds: Bounds) -> int:
    """Return how many blocks are in use to vLLM and held by no request."""
    return len(bounds.bounded.capped._withheld)


# What comes back ----------------------------------------------------------------------------------------------------


def test_the_memory_of_capped_blocks_is_back_and_is_taken_again_on_demand(make_core: MakeCore) -> None:
    """A cap of a quarter returns three quarters of the pool; raised, the engine fills its pool as before."""
    core = make_core()
    bounds = Bounds(core)
    for seed in range(20):
        cores.serve(core, seed)
    before = anonymous_bytes()
    report = bounds.set(QUARTER_TOKENS, Bound.CAP)
    fell = before - anonymous_bytes()
    assert (report.cap.outcome, report.returns) == (Outcome.APPLIED, "yes")
    assert report.token_bytes * BLOCK_TOKENS == BLOCK_BYTES
    assert report.pool_bytes == BLOCKS * BLOCK_BYTES == report.resident_bytes + report.returned_bytes
    assert report.returned_bytes > MOST_OF_IT * 3 / 4 * report.pool_bytes
    assert fell > MOST_OF_IT * report.returned_bytes
    assert report.idle_tokens + report.active_tokens <= QUARTER_TOKENS
    assert withheld(bounds) == -(-(POOL_TOKENS - QUARTER_TOKENS) // BLOCK_TOKENS)
    assert [cores.serve(core, 19), cores.serve(core, 0)] == [HIT_TOKENS, 0]
    assert bounds.settle().returned_bytes == report.returned_bytes
    report = bounds.set(UNLIMITED, Bound.CAP)
    assert (report.cap.outcome, withheld(bounds)) == (Outcome.APPLIED, 0)
    for seed in range(100, 133):
        cores.serve(core, seed)
    report = bounds.settle()
    assert report.idle_tokens > POOL_TOKENS * MOST_OF_IT
    assert report.returned_bytes < (1 - MOST_OF_IT) * report.pool_bytes
    assert abs(before - anonymous_bytes()) < (1 - MOST_OF_IT) * report.pool_bytes


@pytest.mark.parametrize("requests", [60, pytest.param(300, marks=pytest.mark.long)])
def test_no_answer_changes_while_limit_and_cap_are_toggled(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    """An untouched run, one with toggled bounds, one that also returns memory, and one in which that is unreadable.

    Bounds change which requests share a batch, and so the last bits of what is computed: tokens are equal to those of
    the untouched run, and log probabilities almost. Returning memory changes no bit.
    """
    print(f"seed {SEED}")
    prompts = make_prompts(requests, SEED)
    core = make_core(num_gpu_blocks_override=PRESSED_BLOCKS, dtype="float32")
    bounds = Bounds(core)
    untouched = answer(core, prompts, 16)
    assert len({tuple(tokens) for tokens, _ in untouched}) > requests // 2
    with monkeypatch.context() as patch:
        patch.setattr(bounds.bounded.memory, "_obstacle", "the test wants it kept")
        kept, withheld_blocks, returned_bytes = toggled(core, bounds, prompts)
    assert withheld_blocks > PRESSED_BLOCKS // 2
    assert returned_bytes == 0
    returned, _, returned_bytes = toggled(core, bounds, prompts)
    assert returned_bytes > PRESSED_BLOCKS // 4 * BLOCK_BYTES
    with unreadable_when_returned(core, monkeypatch) as blocks:
        unreadable, _, _ = toggled(core, bounds, prompts)
    assert sum(blocks) > PRESSED_BLOCKS // 2
    assert returned == kept
    assert unreadable == kept
    assert [tokens for tokens, _ in kept] == [tokens for tokens, _ in untouched]
    for (_, logprobs), (_, others) in zip(kept, untouched, strict=True):
        assert logprobs == pytest.approx(others, abs=1e-3)


def toggled(core: Any, bounds: Bounds, prompts: list[list[int]]) -> tuple[list[Any], int, int]:
    """Answer the prompts while bounds change at random after every step, always at the same ones.

    Also returns the most blocks that were withheld, and the most bytes that were returned.
    """
    assert core.reset_prefix_cache()
    draw, most = random.Random(SEED), [0, 0]

    def between() -> None:
        bounds.toggle(draw)
        most[0] = max(most[0], withheld(bounds))
        most[1] = max(most[1], bounds.bounded.memory.figures().returned_bytes)

    answers = answer(core, prompts, 16, between)
    bounds.set(UNLIMITED, Bound.CAP)
    bounds.set(UNLIMITED, Bound.LIMIT)
    return answers, most[0], most[1]


def test_a_hybrid_model_is_capped_in_shares_of_its_pool(make_core: MakeCore, tmp_path: Path) -> None:
    """With two KV-cache groups a block of 32 counts 16 tokens, and the groups share the tensors that are returned."""
    hybrid = {**HYBRID, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    core = make_core(write_config(hybrid, tmp_path / "hybrid"), load_format="dummy")
    bounds = Bounds(core)
    assert cores.serve(core, 1) == 0
    pool_tokens = POOL_TOKENS // 2
    before = anonymous_bytes()
    report = bounds.set(pool_tokens // 2, Bound.CAP)
    fell = before - anonymous_bytes()
    assert (report.cap.outcome, report.returns, report.capacity_tokens) == (Outcome.APPLIED, "yes", pool_tokens)
    assert fell > MOST_OF_IT * report.returned_bytes > MOST_OF_IT * 0.45 * report.pool_bytes
    assert cores.serve(core, 1) == HIT_TOKENS


def test_a_startup_cap_is_kept_before_the_first_request(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine begins with the cap of its environment, and the memory beyond it is back."""
    monkeypatch.setenv("KVCACHED_MAX_KV_TOKENS", str(QUARTER_TOKENS))
    bounds = Bounds(make_core())
    report = bounds.settle()
    assert (report.cap.outcome, report.cap.applied.limit_tokens) == (Outcome.STARTUP, QUARTER_TOKENS)
    assert withheld(bounds) == -(-(POOL_TOKENS - QUARTER_TOKENS) // BLOCK_TOKENS)
    assert report.returned_bytes > MOST_OF_IT * 3 / 4 * report.pool_bytes


# What an engine does under a cap ------------------------------------------------------------------------------------


def test_a_cap_below_the_longest_request_is_rejected_with_the_number(make_core: MakeCore) -> None:
    """The engine keeps its former cap and says what it needs; at the floor the longest request is served."""
    core = make_core()
    bounds = Bounds(core)
    bounds.set(QUARTER_TOKENS, Bound.CAP)
    report = bounds.set(FLOOR_TOKENS - 1, Bound.CAP)
    assert (report.cap.outcome, report.cap.applied.limit_tokens) == (Outcome.REJECTED_BELOW_FLOOR, QUARTER_TOKENS)
    assert str(FLOOR_TOKENS) in report.cap.reason
    assert bounds.set(FLOOR_TOKENS, Bound.CAP).cap.outcome is Outcome.APPLIED
    cores.add(core, "longest", prompt(3, 2040), max_tokens=8)
    while core.scheduler.has_requests():
        cores.step(core)
    assert cores.serve(core, 4) == 0


def test_blocks_that_requests_hold_are_taken_as_they_end(make_core: MakeCore) -> None:
    """A cap below what runs is applying, the running requests end in peace, and those that wait get what is left."""
    core = make_core(num_gpu_blocks_override=160)
    bounds = Bounds(core)
    for seed in range(8):
        cores.add(core, f"running-{seed}", prompt(seed), max_tokens=40)
    cores.step(core)
    cores.step(core)
    bounds.publish(FLOOR_TOKENS, Bound.CAP)
    cores.step(core)
    report = bounds.bounded.policy.report()
    assert report.cap.outcome is Outcome.APPLYING
    assert report.active_tokens > FLOOR_TOKENS
    steps = 0
    while core.scheduler.has_requests():
        cores.step(core)
        steps += 1
        assert steps < 1000
    report = bounds.settle()
    assert report.cap.outcome is Outcome.APPLIED
    assert report.idle_tokens <= FLOOR_TOKENS


@pytest.mark.parametrize("call", ["reset_prefix_cache", "pause_scheduler", "sleep-1", "sleep-2"])
def test_calls_that_want_the_pool_whole_still_work_under_a_cap(make_core: MakeCore, call: str) -> None:
    """The withheld blocks are given back for the call and taken out after it; the cache is empty, the cap applied."""
    core = make_core(num_gpu_blocks_override=160)
    bounds = Bounds(core)
    capped = bounds.set(FLOOR_TOKENS, Bound.CAP)
    assert [cores.serve(core, 1), cores.serve(core, 1)] == [0, HIT_TOKENS]
    name, _, level = call.partition("-")
    result = getattr(core, name)(*([int(level)] if level else []))
    if name == "reset_prefix_cache":
        assert result is True
    if name == "pause_scheduler":
        core.resume_scheduler()
    if level:
        core.wake_up()
    report = bounds.bounded.policy.report()
    assert (report.cap.outcome, report.idle_tokens) == (Outcome.APPLIED, 0)
    assert (report.returned_bytes, withheld(bounds)) == (capped.returned_bytes, 159 - FLOOR_TOKENS // BLOCK_TOKENS)
    assert [cores.serve(core, 1), cores.serve(core, 1)] == [0, HIT_TOKENS]


def test_an_engine_that_is_left_alone_has_its_whole_pool(make_core: MakeCore) -> None:
    """When the control ends, the withheld blocks are back, and no method of ours is left on the pool."""
    core = make_core(num_gpu_blocks_override=160)
    bounds = Bounds(core)
    bounds.set(FLOOR_TOKENS, Bound.CAP)
    pool = cores.pool_of(core)
    assert pool.get_num_free_blocks() == FLOOR_TOKENS // BLOCK_TOKENS
    core.__dict__["_kvcached_governor"].detach()
    assert pool.get_num_free_blocks() == 159
    assert [cores.serve(core, 1), cores.serve(core, 1)] == [0, HIT_TOKENS]
    assert [vars(each).keys() & {"reset_prefix_cache", "popleft_n"} for each in (pool, pool.free_block_queue)] == [
        set(),
        set(),
    ]


# Where memory is not returned ---------------------------------------------------------------------------------------


def test_with_a_connector_the_cap_is_kept_and_the_report_says_why_no_memory_is_back(
    make_core: MakeCore, tmp_path: Path
) -> None:
    """A KV connector may have registered the memory: it is never given away."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415 - only here

    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path / "kv")},
    )
    core = make_core(num_gpu_blocks_override=160, kv_transfer_config=connector)
    bounds = Bounds(core)
    before = anonymous_bytes()
    report = bounds.set(FLOOR_TOKENS, Bound.CAP)
    assert (report.cap.outcome, report.returned_bytes) == (Outcome.APPLIED, 0)
    assert report.returns.startswith("ExampleConnector may have registered")
    assert withheld(bounds) == 159 - FLOOR_TOKENS // BLOCK_TOKENS
    assert abs(before - anonymous_bytes()) < 16 << 20


@pytest.mark.parametrize("trouble", ["refused", "raised"])
def test_a_worker_that_cannot_return_memory_is_asked_once(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """The cap is applied, the report says why, and nothing is tried again."""
    asked = []

    def fail(*_arguments: object) -> tuple[int, str]:
        asked.append(1)
        if trouble == "raised":
            raise ZeroDivisionError
        return 0, "madvise: EINVAL: the memory is locked or in huge pages"

    monkeypatch.setattr(kv_tensors, "return_rows", fail)
    core = make_core(num_gpu_blocks_override=160)
    bounds = Bounds(core)
    for cap in (FLOOR_TOKENS, UNLIMITED, FLOOR_TOKENS):
        report = bounds.set(cap, Bound.CAP)
        assert (report.cap.outcome, report.returned_bytes) == (Outcome.APPLIED, 0)
        assert ("EINVAL" if trouble == "refused" else "ZeroDivisionError") in report.returns
    assert len(asked) == 1
    assert [cores.serve(core, 1), cores.serve(core, 1)] == [0, HIT_TOKENS]


# Elastic ------------------------------------------------------------------------------------------------------------


def test_an_elastic_engine_that_idles_holds_its_retained_tokens_and_nothing_else(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of free blocks goes after start, and after a limit dropped; what is cached stays and hits."""
    monkeypatch.setenv("KVCACHED_ELASTIC", "1")
    monkeypatch.setenv("KVCACHED_ELASTIC_AFTER", "0.4")
    before = anonymous_bytes()
    core = make_core()
    bounds = Bounds(core)
    memory = bounds.bounded.memory
    wait_until(lambda: memory.figures().returned_bytes > MOST_OF_IT * memory.shape.pool_bytes, 30.0)
    print("after start", anonymous_bytes() - before, memory.figures())
    for seed in range(15):
        cores.serve(core, seed)
    used = memory.figures().returned_bytes
    assert used < 0.6 * memory.shape.pool_bytes
    bounds.set(2 * 512, Bound.LIMIT)
    kept_bytes = 2 * 512 // BLOCK_TOKENS * BLOCK_BYTES
    most = MOST_OF_IT * (memory.shape.pool_bytes - kept_bytes)
    wait_until(lambda: memory.figures().returned_bytes > most, 30.0)
    assert [cores.serve(core, 14), cores.serve(core, 0)] == [HIT_TOKENS, 0]
    wait_until(lambda: bounds.bounded.policy.wake_at is None, 30.0)  # nothing is looked at by an engine that idles


def test_a_steady_load_on_an_elastic_engine_pays_no_page_faults(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 30 % of the pool in use the same blocks are used again and again, and the others stay returned.

    The blocks of a batch are asked for in steps that last longer than the elastic delay on a loaded machine.
    """
    monkeypatch.setenv("KVCACHED_ELASTIC", "1")
    monkeypatch.setenv("KVCACHED_ELASTIC_AFTER", "1")
    core = make_core()
    bounds = Bounds(core)
    bounds.set(5 * 512, Bound.LIMIT)
    memory = bounds.bounded.memory
    wait_until(lambda: memory.figures().returned_bytes > MOST_OF_IT * memory.shape.pool_bytes, 60.0)
    faults, taken = [], []
    for batch in range(10):
        before = minor_faults()
        returned = memory.figures().returned_bytes
        least = returned
        for seed in range(4 * batch, 4 * batch + 4):
            cores.add(core, f"request-{seed}", prompt(seed))
        while core.scheduler.has_requests():
            cores.step(core)
            least = min(least, memory.figures().returned_bytes)
        faults.append(minor_faults() - before)
        taken.append((returned - least) // BLOCK_BYTES)
    print(f"blocks taken again per batch: {taken}; page faults: {faults}; all KV of a batch is {4 * 17 * 128} pages")
    assert sum(taken[:3]) > 4 * 17
    assert min(taken[4:]) == 0
    assert min(faults[4:]) < 4 * 17 * 128 / 50
    assert memory.figures().returned_bytes > 0.6 * memory.shape.pool_bytes


# Whole engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cap_published_from_outside_ends_when_the_memory_of_all_workers_is_back(
    wide: Path, tmp_path: Path, workers: int
) -> None:
    """With TP = 1 and TP = 2, each worker a process, and one of a node without kvcached.

    What the workers' anonymous memory falls by is what the report says; no answer is left for vLLM's own next question.
    """
    environment = engine_environment(
        tmp_path / "ledger", "tp", VLLM_CPU_OMP_THREADS_BIND="|".join("01"[:workers]), VLLM_SERVER_DEV_MODE="1"
    )
    environment = with_plugin(environment, "without_kvcached", tmp_path)
    options = ["--tensor-parallel-size", str(workers), "--num-gpu-blocks-override", str(BLOCKS)]
    with serving(wide, tmp_path, environment, *options) as server:
        for seed in range(3):
            server.cached_tokens(prompt(seed))
        state = wait_until(lambda: (found := server.replica())["idle_tokens"] and found, 10.0)
        assert (state["token_bytes"], state["pool_bytes"]) == (BLOCK_BYTES // BLOCK_TOKENS, BLOCKS * BLOCK_BYTES)
        pids = descendants(server.process.pid)
        before = sum(anonymous_bytes(pid) for pid in pids)
        assert cap(QUARTER_TOKENS, server).accepted
        fell = before - sum(anonymous_bytes(pid) for pid in pids)
        state = server.replica()
        print(workers, fell, state)
        assert (state["cap"]["outcome"], state["returns"], state["split"]) == ("applied", "yes", False)
        assert fell > MOST_OF_IT * state["returned_bytes"] > MOST_OF_IT * 0.7 * state["pool_bytes"]
        assert server.cached_tokens(prompt(2)) == HIT_TOKENS
        assert server.ask_workers("check_health") == [None] * workers
        cap(UNLIMITED, server)
        for seed in range(100, 100 + BLOCKS * BLOCK_TOKENS // 512):
            server.cached_tokens(prompt(seed))
        assert server.replica()["idle_tokens"] > QUARTER_TOKENS


def cap(tokens: int, server: Server) -> PublicationResult:
    """Publish a cap and wait until the memory beyond it is back."""
    result = set_kv_capacity_limit(tokens, instance_name=server.instance, ledger_dir=server.ledger_dir, wait=60)
    assert result.applied, result
    return result
