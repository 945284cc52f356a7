"""The hooks, iteration by iteration, on SGLang's real trees."""

from __future__ import annotations

import itertools
import logging
import pkgutil
import time
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from sglang_caches import Cached, build
from sglang_placed import INSTANCE, Placed, begun, place, scheduler_of, start_second_rank, take_place
from torch.distributed import HashStore

from kvcached.control import get_instances, set_prefix_cache_retention_limit
from kvcached.engines.sglang import hook_places
from kvcached.engines.sglang.rank_messages import CHUNK_TOKENS
from kvcached.engines.sglang.scheduler_hooks import SchedulerHooks
from kvcached.settings import read_settings
from kvcached.values import Outcome, Update

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcached.control import PublicationResult

LEAF = 100
UNLIMITED = {"KVCACHED_MAX_CACHED_TOKENS": "-1"}


def filled(leaves: int) -> Cached:
    """Return a cache with that many idle leaves."""
    cached = build("unified-python", size=65536)
    for leaf in range(leaves):
        cached.insert([leaf * 1000 + step for step in range(LEAF)])
    return cached


def publish(limit: int, ledger_dir: Path, wait: float | None = None) -> PublicationResult:
    """Publish a limit to the placed instance."""
    return set_prefix_cache_retention_limit(limit, instance_name=INSTANCE, ledger_dir=ledger_dir, wait=wait)


def publish_to(placed: Placed, limit: int, ledger_dir: Path) -> None:
    """Publish a limit, and wait until the subscription of the source rank has read it."""
    assert publish(limit, ledger_dir).accepted
    source = placed.hooks._source
    assert source is not None
    assert source._subscription.wait(time.monotonic() + 20)


def outcome(ledger_dir: Path) -> Outcome:
    """Return what the placed instance reports."""
    return get_instances(ledger_dir)[0].replicas[0].outcome


def idle(placed: Placed) -> int:
    """Return how many tokens are idle."""
    return int(placed.scheduler.tree_cache.evictable_size())


def test_the_first_message_is_the_startup_limit_and_then_nothing(tmp_path: Path) -> None:
    """The source rank begins with its startup limit and stays silent until something is published, once each."""
    placed = place(filled(3), tmp_path, environ={"KVCACHED_MAX_CACHED_TOKENS": "250"})
    assert placed.iterate() == [begun(250)]
    assert placed.iterate() == []
    publish_to(placed, 100, tmp_path)
    assert placed.iterate() == [Update(1, 100)]
    assert [placed.iterate() for _ in range(3)] == [[], [], []]
    assert idle(placed) == LEAF


def test_an_update_that_the_engine_holds_back_is_not_sent_again(tmp_path: Path) -> None:
    """While a broadcast update waits for its turn, the source rank does not broadcast it again."""
    placed = place(filled(3), tmp_path, environ=UNLIMITED)
    placed.iterate()
    publish_to(placed, 0, tmp_path)
    assert placed.hooks.announce(None, [], None)[0][1] == [Update(1, 0)]
    assert placed.hooks.announce(None, [], None) is None
    placed.receive([Update(1, 0)])
    assert idle(placed) == 0


def test_news_go_in_front_of_the_requests(tmp_path: Path) -> None:
    """What is broadcast is a list as before, the other arguments are passed on, and other ranks add nothing."""
    placed = place(filled(1), tmp_path, environ=UNLIMITED)
    requests = ["request"]
    arguments, named = placed.hooks.announce("receiver", requests, "local", more=1)
    assert arguments == ("receiver", [begun(-1), "request"], "local")
    assert named == {"more": 1}
    assert requests == ["request"]
    assert placed.hooks.announce("receiver", None) is None


def test_a_rank_that_is_no_source_opens_no_ledger(tmp_path: Path) -> None:
    """Other ranks neither read nor write a file; they do what they are told."""
    placed = place(filled(3), tmp_path / "ledgers", source=False)
    start_second_rank(placed, -1)
    assert placed.iterate() == []
    placed.receive([Update(1, 100)])
    assert idle(placed) == LEAF
    assert not (tmp_path / "ledgers").exists()


def test_with_attention_data_parallelism_news_stay_with_the_work(tmp_path: Path) -> None:
    """News are taken out of the control requests, which go to all replicas, and put before the work requests."""
    hooks = place(filled(1), tmp_path).hooks
    assert hooks.keep_with_work((["work"], ["control", Update(1, 0)]), None, None) == (
        [Update(1, 0), "work"],
        ["control"],
    )
    assert hooks.keep_with_work((["work"], ["control"]), None, None) is None


def test_a_big_drop_takes_one_chunk_per_iteration(tmp_path: Path) -> None:
    """Each iteration evicts one chunk, releases add none, and the outcome follows."""
    leaves = 3 * CHUNK_TOKENS // LEAF
    placed = place(filled(leaves), tmp_path, environ=UNLIMITED)
    placed.iterate()
    publish_to(placed, 0, tmp_path)
    seen = [idle(placed)]
    while seen[-1]:
        placed.iterate()
        seen.append(idle(placed))
        assert outcome(tmp_path) is (Outcome.APPLYING if seen[-1] else Outcome.APPLIED)
        placed.hooks.release()
        assert idle(placed) == seen[-1]
    steps = [before - after for before, after in itertools.pairwise(seen)]
    assert len(steps) == 3
    assert all(CHUNK_TOKENS <= step < CHUNK_TOKENS + LEAF for step in steps[:-1])


def test_a_sleeping_scheduler_keeps_awake_while_it_drains(tmp_path: Path) -> None:
    """With --sleep-on-idle the doorbell stays readable as long as there is a chunk to evict, and no longer."""
    placed = place(filled(3 * CHUNK_TOKENS // LEAF), tmp_path, sleeps=True, environ=UNLIMITED)
    placed.iterate()
    poller = placed.scheduler.idle_sleeper.poller
    assert poller.poll(0) == []
    publish_to(placed, 0, tmp_path)
    assert poller.poll(2000), "the publication rings"
    placed.iterate()
    while idle(placed):
        assert poller.poll(0)
        placed.iterate()
    placed.iterate()
    assert poller.poll(200) == []


def test_what_becomes_idle_without_a_release_is_caught_one_iteration_later(tmp_path: Path) -> None:
    """Tokens unlocked by a transfer's end or a closed session are evicted at the next iteration."""
    cached = filled(2)
    placed = place(cached, tmp_path, environ={"KVCACHED_MAX_CACHED_TOKENS": "0"})
    lock = cached.lock(list(range(LEAF)))
    placed.iterate()
    placed.iterate()
    assert idle(placed) == 0
    cached.unlock(lock)
    assert idle(placed) == LEAF
    placed.iterate()
    assert idle(placed) == 0


def test_a_failed_eviction_waits_for_the_next_release(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failure is counted and said once; iterations do not try again, releases do."""
    cached = filled(2)
    placed = place(cached, tmp_path, environ=UNLIMITED)
    placed.iterate()
    evict, calls = cached.tree_cache.evict, []

    def fail(params: object) -> None:
        calls.append(params)
        message = "injected"
        raise RuntimeError(message)

    cached.tree_cache.evict = fail
    publish_to(placed, 0, tmp_path)
    for _ in range(50):
        placed.iterate()
    assert len(calls) == 1
    assert outcome(tmp_path) is Outcome.EVICTION_FAILED
    placed.hooks.release()
    assert len(calls) == 2
    assert sum("eviction failed" in record.message for record in caplog.records) == 1
    cached.tree_cache.evict = evict
    placed.hooks.release()
    assert outcome(tmp_path) is Outcome.APPLIED
    assert idle(placed) == 0


def test_no_exception_of_ours_reaches_the_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A hook that fails is as good as none, and says so once."""
    placed = place(filled(1), tmp_path)
    placed.iterate()
    placed.hooks._replica = object()
    for _ in range(3):
        assert placed.hooks.end_iteration(None, None, []) is None
        assert placed.hooks.release() is None
    said = [
        record for record in caplog.records if "keeps serving" in record.message and record.levelno == logging.ERROR
    ]
    assert len(said) == 2


def test_a_scheduler_that_our_hook_never_met_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A scheduler that makes its dispatcher in its own way is not governed; log and slot say so once."""
    hooks = SchedulerHooks(read_settings("sglang", {"KVCACHED_LEDGER_DIR": str(tmp_path)}))
    scheduler = scheduler_of(filled(1))
    for _ in range(3):
        hooks.end_iteration(None, scheduler, [])
    assert sum("does not control" in record.message for record in caplog.records) == 1
    assert outcome(tmp_path) is Outcome.UNSUPPORTED_ENGINE


def test_a_cache_that_does_not_count_is_refused(tmp_path: Path) -> None:
    """A prefix cache without a count of idle tokens is left alone, and publishers learn its name."""

    class Uncounted:
        page_size = 1

    cached = filled(1)
    cached.tree_cache = Uncounted()
    placed = place(cached, tmp_path)
    assert placed.hooks.announce(None, [], None) is None
    result = publish(0, tmp_path, wait=5)
    assert result.accepted
    assert not result.applied
    assert "Uncounted" in result.rejections[0].reason
    assert outcome(tmp_path) is Outcome.UNSUPPORTED_ENGINE


def without_capacity(scheduler: SimpleNamespace) -> None:
    scheduler.token_to_kv_pool_allocator = SimpleNamespace()


def without_page_size(scheduler: SimpleNamespace) -> None:
    scheduler.tree_cache = SimpleNamespace(evictable_size=int)


def without_ranks(scheduler: SimpleNamespace) -> None:
    scheduler.ps = SimpleNamespace()


def without_devices(scheduler: SimpleNamespace) -> None:
    del scheduler.server_args.device


def without_a_dispatcher(scheduler: SimpleNamespace) -> None:
    del scheduler._request_dispatcher


LACKS = (without_capacity, without_page_size, without_ranks, without_devices, without_a_dispatcher)


@pytest.mark.parametrize("lack", LACKS)
def test_whatever_fails_when_a_scheduler_takes_its_place_is_reported(
    tmp_path: Path, lack: Callable[[SimpleNamespace], None]
) -> None:
    """A scheduler that lacks anything the plugin reads is left alone; waiters get the reason, and the log has it."""
    scheduler = scheduler_of(filled(1))
    lack(scheduler)
    placed = take_place(scheduler, tmp_path, HashStore())
    assert placed.hooks.announce(None, [], None) is None
    placed.hooks.end_iteration(None, scheduler, [])
    result = publish(0, tmp_path, wait=20)
    assert result.accepted
    assert "AttributeError: " in result.rejections[0].reason
    assert outcome(tmp_path) is Outcome.UNSUPPORTED_ENGINE


@pytest.mark.parametrize("lack", LACKS)
def test_whatever_fails_then_refuses_a_strict_start(tmp_path: Path, lack: Callable[[SimpleNamespace], None]) -> None:
    """With KVCACHED_STRICT=1 the same ends the start."""
    scheduler = scheduler_of(filled(1))
    lack(scheduler)
    with pytest.raises(SystemExit, match=r"AttributeError: .*KVCACHED_STRICT=1"):
        take_place(scheduler, tmp_path, HashStore(), {"KVCACHED_STRICT": "1"})


def test_an_sglang_under_another_name_is_governed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build whose distribution is not called sglang has no version there; that is no reason to leave it alone."""

    def no_such_distribution(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", no_such_distribution)
    placed = place(filled(3), tmp_path, environ={"KVCACHED_MAX_CACHED_TOKENS": "100"})
    placed.iterate()
    assert idle(placed) == LEAF


@pytest.mark.parametrize("target", list(hook_places._LEADING_PARAMETERS))
def test_a_renamed_or_reshaped_target_is_missed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each target is looked for by name and by the parameters that its hook relies on."""
    assert hook_places.find_missing() == []
    owner_name, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner_name)
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        assert hook_places.find_missing() == [target]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda other: other)
        assert hook_places.find_missing() == [target]
    assert hook_places.find_missing() == []
