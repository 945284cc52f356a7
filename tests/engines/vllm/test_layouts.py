"""The limit on engines of other shapes: several GPUs, several replicas, and an engine inside the application."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from vllm_models import HYBRID, write_config
from vllm_serving import (
    BLOCK_TOKENS,
    BLOCKS,
    HIT_TOKENS,
    PROMPT_TOKENS,
    application,
    engine_environment,
    prompt,
    replicas,
    serving,
    set_limit,
    wait_until,
    with_plugin,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_two_tensor_parallel_workers_are_two_members_of_one_replica(model: Path, tmp_path: Path) -> None:
    """With TP = 2 one publication reaches both members; the startup limit holds from the first request.

    One worker's node has no kvcached. It is asked for its device all the same, and no answer is left in the executor's
    queues for vLLM's own next question.
    """
    environment = engine_environment(
        tmp_path / "ledger",
        "tp",
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        VLLM_SERVER_DEV_MODE="1",
        KVCACHED_MAX_CACHED_TOKENS="100",
    )
    environment = with_plugin(environment, "without_kvcached", tmp_path)
    with serving(model, tmp_path, environment, "--tensor-parallel-size", "2") as server:
        server.cached_tokens(prompt(1))
        started = wait_until(lambda: settled(server.instance, tmp_path / "ledger"), 10.0)[0]
        assert (started["outcome"], started["idle_tokens"]) == ("startup", 96)
        assert [member["gpu"] for member in started["members"]] == ["cpu-0", "cpu-1"]
        assert (started["tp_size"], started["startup_limit_tokens"]) == (2, 100)
        server.set(-1)
        server.cached_tokens(prompt(1))
        assert server.cached_tokens(prompt(1)) == HIT_TOKENS
        server.set(0)
        assert server.replica()["split"] is False
        assert server.cached_tokens(prompt(1)) == 0
        assert server.ask_workers("check_health") == [None, None]


def test_both_data_parallel_replicas_change_and_no_batch_is_started(model: Path, tmp_path: Path) -> None:
    """With DP = 2 both replicas evict while idle, and waking them starts neither a step nor a dummy batch."""
    environment = engine_environment(tmp_path / "ledger", "dp", POOL_CHECKER_REPORT=str(tmp_path / "pool"))
    environment = with_plugin(environment, "pool_checker", tmp_path)
    with serving(model, tmp_path, environment, "--data-parallel-size", "2") as server:
        for seed in range(8):
            server.cached_tokens(prompt(seed))
        before = wait_until(lambda: settled(server.instance, tmp_path / "ledger"), 10.0)
        assert [replica["replica"] for replica in before] == [0, 1]
        assert all(replica["idle_tokens"] >= PROMPT_TOKENS for replica in before), before
        time.sleep(1.0)  # the checkers write after the slots were acknowledged
        steps = pool_counts(tmp_path, "steps")
        server.set(0)
        after = replicas(server.instance, tmp_path / "ledger")
        assert [replica["idle_tokens"] for replica in after] == [0, 0]
        assert [replica["applied"]["limit_tokens"] for replica in after] == [0, 0]
        assert sorted(member["gpu"] for replica in after for member in replica["members"]) == ["cpu-0", "cpu-1"]
        wait_until(lambda: pool_counts(tmp_path, "evicted_blocks") > 0, 10.0)
        assert pool_counts(tmp_path, "steps") == steps
        assert pool_counts(tmp_path, "dummy_batches") == 0
    assert pool_failures(tmp_path) == []


def test_an_engine_inside_the_application_changes_while_it_idles(model: Path, tmp_path: Path) -> None:
    """With VLLM_ENABLE_V1_MULTIPROCESSING=0 the limit is applied at once, though no engine thread runs."""
    ledger_dir = tmp_path / "ledger"
    environment = engine_environment(
        ledger_dir,
        "inproc",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        POOL_CHECKER_REPORT=str(tmp_path / "pool"),
    )
    environment = with_plugin(environment, "pool_checker", tmp_path)
    with application(model, tmp_path / "inproc.log", environment) as running:
        assert len(replicas("inproc", ledger_dir)) == 1
        assert [running.cached_tokens(1), running.cached_tokens(1)] == [0, HIT_TOKENS]
        assert set_limit(0, "inproc", ledger_dir)["applied"] is True
        assert [running.cached_tokens(1), running.cached_tokens(1)] == [0, 0]
        set_limit(100, "inproc", ledger_dir)
        running.cached_tokens(2)
        (state,) = replicas("inproc", ledger_dir)
        assert (state["idle_tokens"], state["active_tokens"]) == (96, 0)
        assert running.cached_tokens(2) == 96
    assert pool_failures(tmp_path) == []
    assert replicas("inproc", ledger_dir) == []


def test_a_token_of_a_hybrid_model_is_a_share_of_its_pool(tmp_path: Path) -> None:
    """With two KV-cache groups a block of 32 counts 16 tokens; the least recently used prompts go first."""
    ledger_dir = tmp_path / "ledger"
    hybrid = write_config(HYBRID, tmp_path / "model")
    environment = engine_environment(ledger_dir, "hybrid")
    with application(hybrid, tmp_path / "hybrid.log", environment, one_process=True) as running:
        running.cached_tokens(1)
        (state,) = wait_until(lambda: settled("hybrid", ledger_dir), 10.0)
        one_prompt = state["idle_tokens"]
        # 16 blocks of full attention, and of the sliding window what the release keeps of it.
        assert PROMPT_TOKENS // 2 < one_prompt <= PROMPT_TOKENS
        assert state["capacity_tokens"] == (BLOCKS - 1) * BLOCK_TOKENS // 2
        set_limit(0, "hybrid", ledger_dir)
        set_limit(2 * one_prompt + BLOCK_TOKENS, "hybrid", ledger_dir)
        for seed in (2, 3, 4):
            running.cached_tokens(seed)
        assert [running.cached_tokens(seed) for seed in (4, 3, 2)] == [HIT_TOKENS, HIT_TOKENS, 0]
        set_limit(1, "hybrid", ledger_dir)
        (state,) = replicas("hybrid", ledger_dir)
        assert state["idle_tokens"] == BLOCK_TOKENS


def settled(instance: str, ledger_dir: Path) -> list[dict[str, Any]]:
    """Return the replicas once all of them have idle and no active tokens, else nothing."""
    found = replicas(instance, ledger_dir)
    return found if all(replica["idle_tokens"] and not replica["active_tokens"] for replica in found) else []


def pool_reports(directory: Path) -> list[dict[str, Any]]:
    """Return what the pool checkers of all engine cores wrote."""
    return [json.loads(path.read_text()) for path in directory.glob("pool.*") if path.suffix != ".draft"]


def pool_counts(directory: Path, what: str) -> int:
    """Return a sum over all engine cores."""
    return sum(report["counts"].get(what, 0) for report in pool_reports(directory))


def pool_failures(directory: Path) -> list[str]:
    """Return the failures of all engine cores; there has to be at least one that was checked."""
    reports = pool_reports(directory)
    assert all(report["counts"]["scans"] for report in reports)
    assert reports
    return [failure for report in reports for failure in report["failures"]]
