"""The limit of a tensor-parallel server, changed from outside while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang_server import prompt, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Say, Serve
    from sglang_server import Server

LENGTH = 512


@pytest.fixture(scope="module")
def server(serve_module: Serve, plain_model: Path) -> Server:
    """Return a server of two tensor-parallel ranks that has not served anything yet."""
    return serve_module(plain_model, "--tp-size", "2", "--skip-server-warmup")


def test_an_update_before_the_very_first_request_holds_for_it(server: Server) -> None:
    """A limit published to a server that never served is in force when it does."""
    server.apply_limit(0)
    assert server.generate(prompt(1, LENGTH)).cached_tokens == 0
    assert server.generate(prompt(1, LENGTH)).cached_tokens == 0


def test_a_limit_set_while_idle_holds_at_the_next_request(server: Server, say: Say) -> None:
    """Limit 0 empties an idle cache on both ranks, and lifting it lets the cache fill again."""
    server.apply_limit(-1)
    server.generate(prompt(2, LENGTH))
    assert server.generate(prompt(2, LENGTH)).cached_tokens == LENGTH - 1
    server.apply_limit(0)
    assert server.generate(prompt(2, LENGTH)).cached_tokens == 0
    server.apply_limit(-1)
    server.generate(prompt(2, LENGTH))
    assert server.generate(prompt(2, LENGTH)).cached_tokens == LENGTH - 1
    evicted = server.metric("sglang:evicted_tokens_total")
    say(f"evicted tokens by rank: {evicted}")
    if set(evicted) == {""}:  # releases up to 0.5.20 count both ranks in one figure
        assert evicted[""] >= 2 * LENGTH
        assert evicted[""] % 2 == 0
    else:
        assert set(evicted) == {"0", "1"}
        assert evicted["0"] == evicted["1"] >= LENGTH


def test_the_source_rank_reports_what_holds(server: Server) -> None:
    """Status names both GPUs of the replica, the pair in force, and counts that add up."""
    server.apply_limit(-1)
    server.generate(prompt(3, LENGTH))
    wait_until(lambda: server.status()[0]["active_tokens"] == 0, 30, "the finished request's tokens count as idle")
    server.apply_limit(0)
    replica = server.status()[0]
    assert [member["gpu"] for member in replica["members"]] == ["cpu-0", "cpu-1"]
    assert (replica["tp_size"], replica["pp_size"]) == (2, 1)
    assert replica["applied"]["limit_tokens"] == 0
    assert (replica["outcome"], replica["idle_tokens"], replica["active_tokens"]) == ("applied", 0, 0)
    assert replica["capacity_tokens"] == 8192
    assert replica["evicted_tokens"] >= LENGTH
    assert replica["eviction_errors"] == 0


def test_a_positive_limit_is_an_upper_bound(server: Server) -> None:
    """Several conversations fill the cache up to the limit, least recently used ones go, whole leaves at a time."""
    server.apply_limit(250)
    for seed in range(10, 20):
        server.generate(prompt(seed, 100), tokens=1)
    wait_until(lambda: server.status()[0]["active_tokens"] == 0, 30, "the last request's tokens count as idle")
    assert 100 <= server.status()[0]["idle_tokens"] <= 250
    assert server.generate(prompt(19, 100), tokens=1).cached_tokens == 99
    assert server.generate(prompt(10, 100), tokens=1).cached_tokens == 0


def test_an_update_while_generation_is_paused_is_applied(server: Server) -> None:
    """A paused engine goes on taking limits over."""
    server.apply_limit(-1)
    server.generate(prompt(4, LENGTH))
    server.post("/pause_generation", {"mode": "in_place"})
    try:
        server.apply_limit(0)
    finally:
        server.post("/continue_generation", {})
    assert server.generate(prompt(4, LENGTH)).cached_tokens == 0


def test_a_flush_of_the_cache_leaves_the_limit(server: Server) -> None:
    """SGLang's own flush empties the cache and changes no limit."""
    server.apply_limit(200)
    server.post("/flush_cache", {})
    server.generate(prompt(5, 300))
    assert server.generate(prompt(5, 300)).cached_tokens == 0


def test_aborted_requests_leave_nothing_behind(server: Server) -> None:
    """After 100 requests were aborted in prefill, limit 0 leaves no idle and no active token."""
    server.apply_limit(-1)
    crowd = [prompt(100 + seed, 1500) for seed in range(100)]

    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - the one test that needs it

    with ThreadPoolExecutor(len(crowd)) as pool:
        answers = [pool.submit(server.generate, ids, 200) for ids in crowd]
        wait_until(lambda: server.status()[0]["active_tokens"] > 1000, 30, "the crowd is being prefilled")
        server.post("/abort_request", {"abort_all": True})
        for answer in answers:
            answer.exception()  # how SGLang words an abort is its own matter
    wait_until(lambda: server.status()[0]["active_tokens"] == 0, 30, "no request is left")
    server.apply_limit(0)
    replica = server.status()[0]
    assert (replica["idle_tokens"], replica["active_tokens"]) == (0, 0)
