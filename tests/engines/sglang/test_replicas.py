"""Data-parallel replicas are governed each by itself, under one name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_server import prompt, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Serve


def test_both_replicas_take_a_limit_over(serve: Serve, plain_model: Path) -> None:
    """One publication reaches the schedulers of both replicas, and each evicts its own cache."""
    server = serve(plain_model, "--dp-size", "2", probes=("record",))
    for _ in range(2):
        server.generate_all([prompt(seed, 200) for seed in range(6)])
    server.apply_limit(0)
    replicas = server.status()
    assert [replica["replica"] for replica in replicas] == [0, 1]
    assert [[member["gpu"] for member in replica["members"]] for replica in replicas] == [["cpu-0"], ["cpu-1"]]
    assert [(replica["outcome"], replica["idle_tokens"]) for replica in replicas] == [("applied", 0)] * 2
    assert all(replica["evicted_tokens"] >= 200 for replica in replicas)
    wait_until(lambda: all(server.records().values()), 30.0, "records, written after acknowledging")
    for records in (server.records()[0, 0, 0], server.records()[1, 0, 0]):
        assert [record["revision"] for record in records if record["event"] == "apply"] == [1]
    assert not any(answer.cached_tokens for answer in server.generate_all([prompt(seed, 200) for seed in range(6)]))


def test_replicas_inside_one_tensor_parallel_group_are_told_apart(serve: Serve, plain_model: Path) -> None:
    """With attention data parallelism each rank is a replica, and sees each revision exactly once."""
    options = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--skip-server-warmup")
    server = serve(plain_model, *options, probes=("record",))
    limits = (0, 100, 50)
    for limit in limits:
        server.apply_limit(limit)
    assert [replica["replica"] for replica in server.status()] == [0, 1]
    wait_until(lambda: all(len(each) >= len(limits) for each in server.records().values()), 30.0, "all records")
    for place in ((0, 0, 0), (1, 0, 1)):
        applied = [(record["revision"], record["limit"]) for record in server.records()[place]]
        assert applied == list(enumerate(limits, start=1))


def test_a_scheduler_that_receives_rarely_still_takes_limits_over(serve: Serve, plain_model: Path) -> None:
    """With a receive interval of 50 iterations an update waits for its turn, no longer."""
    server = serve(plain_model, "--scheduler-recv-interval", "50")
    server.generate(prompt(1, 300))
    server.apply_limit(0)
    assert server.generate(prompt(1, 300)).cached_tokens == 0
