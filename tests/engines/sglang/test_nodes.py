"""Launches over two nodes, one of which may lack the plugin; both are on this machine, in environments of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang_server import Server, free_port, prompt, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Launch = Callable[[dict[str, str], dict[str, str]], tuple[Server, Server]]

NO_PLUGIN = {"SGLANG_PLUGINS": "kvcached-probes"}
DISABLED = {"KVCACHED_DISABLE": "1"}
NOTHING = {"KVCACHED_MAX_CACHED_TOKENS": "0"}


@pytest.fixture
def launch(tmp_path: Path, plain_model: Path, probes: Path) -> Iterator[Launch]:
    """Start both nodes of a launch, one rank on each, each with its own part of the environment."""
    servers: list[Server] = []

    def start(first: dict[str, str], second: dict[str, str]) -> tuple[Server, Server]:
        options = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}")
        for rank, environ in enumerate((first, second)):
            folder = tmp_path / f"node-{rank}"
            servers.append(Server(plain_model, folder, probes, (*options, "--node-rank", str(rank)), environ=environ))
            servers[-1].start(wait=False)
        servers[0].wait_until_healthy()
        return servers[0], servers[1]

    try:
        yield start
    finally:
        for server in servers:
            server.stop()


def test_both_nodes_keep_the_limit_of_the_first(launch: Launch) -> None:
    """The startup limit and updates of the first node hold on both, whatever the other one's environment says."""
    first, second = launch(NOTHING, {})
    first.generate(prompt(1, 300))
    assert first.generate(prompt(1, 300)).cached_tokens == 0
    first.apply_limit(-1)
    first.generate(prompt(1, 300))
    assert first.generate(prompt(1, 300)).cached_tokens == 299
    first.apply_limit(0)
    assert first.generate(prompt(1, 300)).cached_tokens == 0
    assert not second.ledger_dir.exists()


@pytest.mark.parametrize("lacking", [DISABLED, NO_PLUGIN], ids=["disabled", "not-loaded"])
def test_a_launch_survives_a_node_without_the_plugin_and_is_uncontrolled(
    launch: Launch, lacking: dict[str, str]
) -> None:
    """Nothing is limited on any node, the first one says which rank is to blame, and publishers learn it at once."""
    first, second = launch(NOTHING, lacking)
    first.generate(prompt(1, 300))
    assert first.generate(prompt(1, 300)).cached_tokens == 299
    waited = first.set_limit(0, "--wait", "30")
    assert waited.code == 7, waited
    assert "rank 1 of 2 did not report that kvcached runs there" in waited.out + waited.err
    assert first.status()[0]["outcome"] == "unsupported_engine"
    assert first.generate(prompt(1, 300)).cached_tokens == 299
    assert first.log().count("rank 1 of 2 did not report") == 1
    assert "Scheduler hit an exception" not in first.log() + second.log()


def test_a_launch_survives_a_first_node_without_the_plugin(launch: Launch) -> None:
    """Without the plugin where requests come in there is no slot, and a strict node elsewhere would refuse."""
    first, second = launch(DISABLED, NOTHING)
    first.generate(prompt(1, 300))
    assert first.generate(prompt(1, 300)).cached_tokens == 299
    assert first.set_limit(0).code == 3
    assert not second.ledger_dir.exists()
    assert "Scheduler hit an exception" not in first.log() + second.log()


def test_a_strict_node_refuses_to_serve_beside_one_without_the_plugin(
    tmp_path: Path, plain_model: Path, probes: Path
) -> None:
    """With KVCACHED_STRICT=1 the first node ends its start with the reason."""
    options = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}")
    strict = {**NOTHING, "KVCACHED_STRICT": "1"}
    nodes = [
        Server(plain_model, tmp_path / f"node-{rank}", probes, (*options, "--node-rank", str(rank)), environ=environ)
        for rank, environ in enumerate((strict, DISABLED))
    ]
    try:
        for node in nodes:
            node.start(wait=False)
        wait_until(lambda: nodes[0].exit_code() is not None, 400, "the strict node ends")
        assert nodes[0].exit_code() != 0
        assert "rank 1 of 2 did not report" in nodes[0].log()
        assert "KVCACHED_STRICT=1 forbids" in nodes[0].log()
    finally:
        for node in nodes:
            node.stop()
