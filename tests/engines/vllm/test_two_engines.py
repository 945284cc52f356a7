"""Two real servers in a memory cgroup that is smaller than their pools: caps decide whether the kernel kills one."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from memory_cgroup import MemoryCgroup
from vllm_models import WIDE, write_config
from vllm_serving import BLOCK_TOKENS, engine_environment, prompt, serving, wait_until

from kvcached.control import set_kv_capacity_limit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Self
    from vllm_serving import Server

BLOCK_BYTES = 512 << 10
GROUP_POOLS = 1.3
"""How many pools fit into the group, beside what the engines hold anyway."""
CLIENTS = 3
WITHIN_S = 600.0


@dataclass
class Load:
    """Clients that send prompts which share nothing to one server, in threads, until it is told to stop."""

    server: Server
    first_seed: int
    served: int = 0
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._seeds = itertools.count(self.first_seed)
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.server.complete(prompt(next(self._seeds)))
            except (OSError, AssertionError) as error:  # a server that was killed hangs up, or answers with an error
                self.failures.append(error)
                return
            self.served += 1


def cap(server: Server, tokens: int, wait: float | None = WITHIN_S) -> None:
    """Publish a cap and, unless told otherwise, wait until the memory beyond it is back."""
    result = set_kv_capacity_limit(tokens, instance_name=server.instance, ledger_dir=server.ledger_dir, wait=wait)
    assert result.accepted, result
    assert wait is None or result.applied, result


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    """Return a cgroup that is removed once the servers in it have ended."""
    group = MemoryCgroup()
    yield group
    group.remove()


@pytest.fixture
def pair(request: pytest.FixtureRequest, group: MemoryCgroup, tmp_path: Path) -> Iterator[list[Server]]:
    """Return two servers in the group, each of which began with a quarter of its pool."""
    blocks = request.param
    model = write_config(WIDE, tmp_path / "model")
    with contextlib.ExitStack() as stack:
        servers = []
        for name in ("left", "right"):
            environment = engine_environment(
                tmp_path / name, name, KVCACHED_MAX_KV_TOKENS=str(blocks // 4 * BLOCK_TOKENS)
            )
            options = ("--num-gpu-blocks-override", str(blocks))
            servers.append(stack.enter_context(serving(model, tmp_path, environment, *options, starter=group.starter)))
            server = servers[-1]
            wait_until(lambda server=server: resident_bytes(server) <= 0.26 * blocks * BLOCK_BYTES, WITHIN_S)
        yield servers


def resident_bytes(server: Server) -> int:
    """Return how much of the server's pool holds memory."""
    return int(server.replica()["resident_bytes"])


@pytest.mark.long
@pytest.mark.parametrize(("pair", "minutes"), [(1024, 3), (4096, 10)], indirect=["pair"])
def test_two_servers_live_with_caps_moved_in_the_right_order_and_without_caps_one_is_killed(
    group: MemoryCgroup, pair: list[Server], minutes: int
) -> None:
    """No request fails while memory goes from one to the other again and again; lifted caps are the control."""
    left, right = pair
    for server in pair:
        server.complete(prompt(-1))
    pool_bytes = left.replica()["pool_bytes"]
    quarter = left.replica()["capacity_tokens"] // 4
    group.bound(group.anonymous_bytes() - sum(map(resident_bytes, pair)) + int(GROUP_POOLS * pool_bytes))
    moves = 0
    end = time.monotonic() + 60 * minutes
    with Load(left, 0) as left_load, Load(right, 1 << 20) as right_load:
        while time.monotonic() < end or moves % 2:
            giver, taker = (left, right) if moves % 2 else (right, left)
            cap(giver, quarter)
            cap(taker, 3 * quarter)
            wait_until(lambda taker=taker: resident_bytes(taker) > 0.7 * pool_bytes, WITHIN_S)
            moves += 1
        print(f"{moves} moves; {left_load.served} and {right_load.served} requests in {minutes} minutes")
        assert (group.kills(), left_load.failures, right_load.failures) == (0, [], [])
        assert moves > 1
        for server in pair:
            cap(server, -1, wait=None)
        wait_until(lambda: group.kills() > 0, WITHIN_S)
