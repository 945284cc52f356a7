"""The limit changed under a running OpenAI server, by the real command line, and what its clients then hit."""

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm_serving import (
    BLOCK_TOKENS,
    BLOCKS,
    HIT_TOKENS,
    HOST,
    PROMPT_TOKENS,
    Server,
    engine_environment,
    free_port,
    prompt,
    serving,
    wait_until,
)

from kvcached.control import set_prefix_cache_retention_limit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

seeds = itertools.count(1000)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server that publishes its KV events."""
    directory = tmp_path_factory.mktemp("serving")
    port = free_port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    environment = engine_environment(directory / "ledger", "serving")
    with serving(model, directory, environment, "--kv-events-config", json.dumps(events)) as server:
        server.extra["events_port"] = port
        yield server


@pytest.fixture
def prompts() -> list[list[int]]:
    """Three prompts of 512 tokens that no other test uses."""
    return [prompt(next(seeds)) for _ in range(3)]


def test_zero_evicts_an_idle_engine_and_unlimited_lets_it_cache_again(server: Server, prompts: list[list[int]]) -> None:
    """A repeated prompt hits; after ``set 0 --wait`` it does not; after ``set -1`` it hits again."""
    server.set(-1)
    server.cached_tokens(prompts[0])
    assert server.cached_tokens(prompts[0]) == HIT_TOKENS
    answer = server.set(0)
    assert answer["applied"] is True
    assert server.idle_tokens() == 0
    assert server.cached_tokens(prompts[0]) == 0
    assert server.cached_tokens(prompts[0]) == 0
    server.set(-1)
    assert server.cached_tokens(prompts[0]) == 0
    assert server.cached_tokens(prompts[0]) == HIT_TOKENS


def test_a_limit_keeps_the_most_recently_used_prompts(server: Server, prompts: list[list[int]]) -> None:
    """With room for two of three prompts the two newest hit and the oldest does not."""
    server.set(0)
    server.set(2 * PROMPT_TOKENS)
    for each in prompts:
        server.cached_tokens(each)
    newest_first = [server.cached_tokens(each) for each in reversed(prompts)]
    assert newest_first == [HIT_TOKENS, HIT_TOKENS, 0]


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(1, BLOCK_TOKENS), (BLOCK_TOKENS - 1, BLOCK_TOKENS), (BLOCK_TOKENS, BLOCK_TOKENS), (100, 96)],
)
def test_a_small_limit_keeps_whole_blocks_and_at_least_one(
    server: Server,
    prompts: list[list[int]],
    limit: int,
    kept: int,
) -> None:
    """A positive limit below one block keeps one, 100 tokens keep three blocks of 32: the head of the prompt."""
    server.set(-1)
    server.cached_tokens(prompts[0])
    server.set(limit)
    assert server.idle_tokens() == kept
    assert server.cached_tokens(prompts[0]) == kept
    assert server.idle_tokens() <= max(limit, BLOCK_TOKENS)


def test_the_limit_holds_after_every_request(server: Server, prompts: list[list[int]]) -> None:
    """With the limit 0 nothing stays cached, whether a request finished or its client hung up in mid-stream."""
    server.set(0)
    server.cached_tokens(prompts[0])
    wait_until(lambda: server.idle_tokens() == 0, 10.0)
    server.abort_in_mid_stream(prompts[1])
    state = wait_until(lambda: (replica := server.replica())["active_tokens"] == 0 and replica, 10.0)
    assert state["idle_tokens"] == 0
    assert server.cached_tokens(prompts[1]) == 0


def test_the_slot_tells_idle_active_and_capacity_tokens(server: Server, prompts: list[list[int]]) -> None:
    """The acknowledgement carries the engine's figures, and the evicted tokens add up."""
    server.set(-1)
    server.set(0)
    before = server.replica()
    assert before["capacity_tokens"] == (BLOCKS - 1) * BLOCK_TOKENS
    server.set(-1)
    server.cached_tokens(prompts[0])
    wait_until(lambda: server.idle_tokens() == PROMPT_TOKENS and server.replica()["active_tokens"] == 0, 10.0)
    server.set(0)
    after = server.replica()
    assert after["idle_tokens"] == after["active_tokens"] == after["eviction_errors"] == 0
    assert after["evicted_tokens"] == before["evicted_tokens"] + PROMPT_TOKENS
    assert after["outcome"] == "applied"
    assert (after["tp_size"], after["pp_size"]) == (1, 1)
    assert [member["gpu"] for member in after["members"]] == ["cpu-0"]


def test_a_subscriber_gets_the_removals_of_an_idle_eviction_at_once(server: Server, prompts: list[list[int]]) -> None:
    """A KV-event subscriber hears of an eviction while the engine idles, one removal for each block that was stored."""
    server.set(0)
    server.set(-1)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(f"tcp://{HOST}:{server.extra['events_port']}")
        socket.subscribe(b"")
        time.sleep(0.5)
        server.cached_tokens(prompts[0])
        events = receive(socket, 0.5)
        stored = [each for event in events if isinstance(event, BlockStored) for each in event.block_hashes]
        assert len(stored) == PROMPT_TOKENS // BLOCK_TOKENS
        result = set_prefix_cache_retention_limit(0, instance_name="serving", ledger_dir=server.ledger_dir)
        removed = [event for event in receive(socket, 1.0) if isinstance(event, BlockRemoved)]
    assert result.accepted, result
    assert [each for event in removed for each in event.block_hashes] == stored[::-1]
    assert {event.medium for event in removed} == {"GPU"}


def receive(socket: zmq.Socket[bytes], quiet_s: float) -> list[Any]:
    """Return the events that come until none does for ``quiet_s`` seconds."""
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    events: list[Any] = []
    while socket.poll(int(quiet_s * 1000)):
        events += decoder.decode(socket.recv_multipart()[-1]).events
    return events
