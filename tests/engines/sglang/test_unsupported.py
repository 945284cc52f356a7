"""Servers that the plugin cannot govern, must not govern, or is told wrong things about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_server import Server, prompt, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Serve


def test_a_missing_hook_target_leaves_a_server_that_serves_and_says_so(serve: Serve, plain_model: Path) -> None:
    """Without one hook target nothing is hooked, requests are served, and publishers learn the reason at once."""
    server = serve(plain_model, "--tp-size", "2", environ={"KVCACHED_MAX_CACHED_TOKENS": "0"}, probes=("missing",))
    server.generate(prompt(1, 300))
    assert server.generate(prompt(1, 300)).cached_tokens == 299
    waited = server.set_limit(0, "--wait", "30")
    assert waited.code == 7, waited
    assert waited.seconds < 10
    assert "release_kv_cache" in waited.out + waited.err
    replica = server.status()[0]
    assert (replica["outcome"], replica["applied"]["revision"]) == ("unsupported_engine", 0)
    assert [member["gpu"] for member in replica["members"]] == ["cpu-0", "cpu-1"]
    assert server.log().count("no usable") == 1
    assert server.generate(prompt(1, 300)).cached_tokens == 299


def test_each_replica_inside_one_group_says_that_a_hook_target_is_missing(serve: Serve, plain_model: Path) -> None:
    """With attention data parallelism, whose schedulers are started in another way, all replicas have a slot."""
    options = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--skip-server-warmup")
    server = serve(plain_model, *options, probes=("missing",))
    waited = server.set_limit(0, "--wait", "30")
    assert waited.code == 7, waited
    replicas = server.status()
    assert [replica["replica"] for replica in replicas] == [0, 1]
    assert {replica["outcome"] for replica in replicas} == {"unsupported_engine"}
    assert server.log().count("no usable sglang.srt.mem_cache.common.release_kv_cache") == 2


def test_a_strict_server_refuses_to_start_without_a_hook_target(
    tmp_path: Path, plain_model: Path, probes: Path
) -> None:
    """With KVCACHED_STRICT=1 the launch ends with an error instead."""
    server = Server(plain_model, tmp_path / "server", probes, environ={"KVCACHED_STRICT": "1"}, probes=("missing",))
    server.start(wait=False)
    try:
        assert server.wait_for_exit(400) not in (None, 0)
        assert "release_kv_cache" in server.log()
        assert "KVCACHED_STRICT=1" in server.log()
    finally:
        server.stop()


def test_a_startup_limit_that_is_no_number_stops_the_start(tmp_path: Path, plain_model: Path, probes: Path) -> None:
    """The launch ends with a sentence about the variable, not with a server without limit."""
    server = Server(plain_model, tmp_path / "server", probes, environ={"KVCACHED_MAX_CACHED_TOKENS": "16q"})
    server.start(wait=False)
    try:
        assert server.wait_for_exit(400) not in (None, 0)
        assert "KVCACHED_MAX_CACHED_TOKENS='16q' is not a number of tokens" in server.log()
    finally:
        server.stop()


def test_a_disabled_plugin_does_nothing(serve: Serve, plain_model: Path) -> None:
    """With KVCACHED_DISABLE=1 there is no slot, no file and no limit."""
    server = serve(plain_model, environ={"KVCACHED_DISABLE": "1", "KVCACHED_MAX_CACHED_TOKENS": "0"})
    server.generate(prompt(1, 300))
    assert server.generate(prompt(1, 300)).cached_tokens == 299
    assert server.set_limit(0).code == 3
    assert not server.ledger_dir.exists()


def test_the_startup_limit_holds_until_the_first_publication(serve: Serve, plain_model: Path) -> None:
    """A server started with a limit of 0 retains nothing from its first request on."""
    server = serve(plain_model, "--tp-size", "2", environ={"KVCACHED_MAX_CACHED_TOKENS": "0"})
    server.generate(prompt(1, 300))
    assert server.generate(prompt(1, 300)).cached_tokens == 0
    replica = server.status()[0]
    assert (replica["outcome"], replica["applied"]) == ("startup", {"revision": 0, "limit_tokens": 0})


def test_a_second_server_of_the_same_name_waits_for_it(serve: Serve, plain_model: Path) -> None:
    """Of two servers that share a name the first is governed; the second serves, and takes the name when it is free."""
    first = serve(plain_model)
    second = serve(plain_model, environ={"KVCACHED_LEDGER_DIR": str(first.ledger_dir)})
    second.generate(prompt(1, 300))
    first.apply_limit(0)
    assert second.generate(prompt(1, 300)).cached_tokens == 299
    assert second.log().count("set another KVCACHED_INSTANCE_NAME") == 1
    assert len(first.status()) == 1
    first.stop()
    second.ledger_dir = first.ledger_dir
    wait_until(lambda: second.publish(-1).accepted, 30, "the second server takes the name over")
    second.apply_limit(0)
    assert second.generate(prompt(1, 300)).cached_tokens == 0
