"""Ranks agree that all of them can follow before any of them is told to, and say it when they do not."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sglang_caches import Cached, build
from sglang_placed import INSTANCE, Placed, begun, declare, scheduler_of, take_place
from torch.distributed import HashStore

from kvcached.control import get_instances, set_prefix_cache_retention_limit
from kvcached.engines.sglang import agreement, rank_messages, replica, replica_source
from kvcached.values import Outcome, Update

if TYPE_CHECKING:
    from pathlib import Path

LIMITED = {"KVCACHED_MAX_CACHED_TOKENS": "100"}
STRICT = {**LIMITED, "KVCACHED_STRICT": "1"}


@pytest.fixture
def cached() -> Cached:
    """Return a cache with 300 idle tokens."""
    cached = build("unified-python")
    for leaf in range(3):
        cached.insert([leaf * 1000 + step for step in range(100)])
    return cached


def serve_request(placed: Placed) -> None:
    """Release a request that got an answer, which takes all ranks."""
    placed.hooks.release(None, SimpleNamespace(rid="one", output_ids=[1]), placed.scheduler.tree_cache)


def take_until(placed: Placed, last: Update) -> list[Any]:
    """Run iterations until ``last`` was broadcast, once the watcher has read it; return all that was."""
    messages: list[Any] = []
    deadline = time.monotonic() + 30
    while last not in messages:
        assert time.monotonic() < deadline, messages
        messages += placed.iterate()
    return messages


def reports(ledger_dir: Path) -> tuple[Outcome, str]:
    """Return outcome and reason of the placed replica."""
    (found,) = get_instances(ledger_dir)[0].replicas
    return found.outcome, found.reason


def test_nothing_is_sent_before_the_other_rank_says_that_it_can_follow(tmp_path: Path, cached: Cached) -> None:
    """A source rank is silent while another one has not spoken, and begins when it has, with what was published."""
    store = HashStore()
    placed = take_place(scheduler_of(cached), tmp_path, store, LIMITED)
    assert set_prefix_cache_retention_limit(50, instance_name=INSTANCE, ledger_dir=tmp_path).accepted
    assert placed.iterate() == []
    assert cached.tree_cache.evictable_size() == 300
    declare(scheduler_of(cached, source=False), store)
    placed.hooks._agreement._next_poll = 0.0
    assert take_until(placed, Update(1, 50)) == [begun(100), Update(1, 50)]
    assert cached.tree_cache.evictable_size() <= 50


def test_a_rank_that_never_spoke_leaves_the_launch_uncontrolled_and_says_so(
    tmp_path: Path, cached: Cached, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a request was served the silent rank is known to be without the plugin: log, slot and waiters say so."""
    placed = take_place(scheduler_of(cached), tmp_path, HashStore(), LIMITED)
    assert placed.iterate() == []
    serve_request(placed)
    serve_request(placed)
    assert [placed.iterate() for _ in range(3)] == [[], [], []]
    outcome, reason = reports(tmp_path)
    assert outcome is Outcome.UNSUPPORTED_ENGINE
    assert "rank 1 of 2 did not report" in reason
    assert sum("rank 1 of 2 did not report" in record.message for record in caplog.records) == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(set_prefix_cache_retention_limit, 0, instance_name=INSTANCE, ledger_dir=tmp_path, wait=20)
        while not waiting.done():
            assert placed.iterate() == []
    assert "rank 1 of 2 did not report" in waiting.result().rejections[0].reason
    assert cached.tree_cache.evictable_size() == 300


def test_an_idle_launch_waits_a_while_for_a_silent_rank(
    tmp_path: Path, cached: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a request the source rank gives up after its patience."""
    monkeypatch.setattr(replica_source, "PATIENCE_S", 0.0)
    placed = take_place(scheduler_of(cached), tmp_path, HashStore(), LIMITED)
    assert placed.iterate() == []
    assert reports(tmp_path)[0] is Outcome.UNSUPPORTED_ENGINE


@pytest.mark.parametrize("source", [True, False], ids=["source", "other"])
def test_a_strict_rank_refuses_beside_a_silent_one(
    tmp_path: Path,
    cached: Cached,
    monkeypatch: pytest.MonkeyPatch,
    source: bool,  # noqa: FBT001
) -> None:
    """With KVCACHED_STRICT=1 each rank waits for the others before it serves, and ends its start in vain."""
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.1)
    with pytest.raises(SystemExit, match="did not report that kvcached runs there"):
        take_place(scheduler_of(cached, source=source), tmp_path, HashStore(), STRICT)


def test_a_strict_launch_begins_when_all_ranks_spoke(tmp_path: Path, cached: Cached) -> None:
    """With KVCACHED_STRICT=1 nothing is waited for that is there."""
    store = HashStore()
    declare(scheduler_of(cached, source=False), store)
    assert take_place(scheduler_of(cached), tmp_path, store, STRICT).iterate() == [begun(100)]


def test_a_rank_that_failed_tells_the_source(tmp_path: Path, cached: Cached) -> None:
    """What goes wrong on one rank only is known to the source rank, which then tells nobody to evict."""
    store = HashStore()
    broken = scheduler_of(cached, source=False)
    del broken.token_to_kv_pool_allocator
    take_place(broken, tmp_path, store)
    placed = take_place(scheduler_of(cached), tmp_path, store, LIMITED)
    assert placed.iterate() == []
    outcome, reason = reports(tmp_path)
    assert outcome is Outcome.UNSUPPORTED_ENGINE
    assert "rank 1: AttributeError" in reason


def test_a_rank_of_another_version_is_not_spoken_to(
    tmp_path: Path, cached: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that would not understand the messages, or evict otherwise for them, counts as one that cannot follow."""
    store = HashStore()
    with monkeypatch.context() as patch:
        patch.setattr(rank_messages, "CHUNK_TOKENS", 1)
        declare(scheduler_of(cached, source=False), store)
    placed = take_place(scheduler_of(cached), tmp_path, store, LIMITED)
    assert placed.iterate() == []
    assert "another version" in reports(tmp_path)[1]


def test_a_rank_says_that_the_source_rank_is_silent(
    tmp_path: Path, cached: Cached, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the plugin is missing on the source rank's node, the others say so in their logs, once."""
    monkeypatch.setattr(replica, "PATIENCE_S", 0.0)
    placed = take_place(scheduler_of(cached, source=False), tmp_path / "ledgers", HashStore(), LIMITED)
    for _ in range(3):
        placed.iterate()
    said = [record for record in caplog.records if "rank 0 of 2 did not report" in record.message]
    assert [record.levelno for record in said] == [logging.ERROR]
    assert not (tmp_path / "ledgers").exists()


class FailingStore:
    """A store whose server is gone after the words were left."""

    def set(self, key: str, value: str) -> None:
        """Leave a word."""

    def check(self, keys: list[str]) -> bool:
        """Fail."""
        message = f"no answer about {keys}"
        raise RuntimeError(message)


def test_a_store_that_fails_leaves_the_launch_uncontrolled_and_says_so(tmp_path: Path, cached: Cached) -> None:
    """Where the ranks cannot hear of one another nothing is limited, and publishers learn why."""
    placed = take_place(scheduler_of(cached), tmp_path, FailingStore(), LIMITED)  # type: ignore[arg-type]
    assert [placed.iterate() for _ in range(2)] == [[], []]
    outcome, reason = reports(tmp_path)
    assert outcome is Outcome.UNSUPPORTED_ENGINE
    assert "the store of the launch failed (RuntimeError: no answer about" in reason
