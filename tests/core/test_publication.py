"""Publishing: every status, every way in which members can be missing, and who wins."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import threading
from typing import TYPE_CHECKING

import pytest
from support.toys import ToyCache, poll_now, settle
from support.workers import publish_many

from kvcached.control import get_instances, set_prefix_cache_retention_limit
from kvcached.ledger.addressees import Addressees, look_up
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.publication import UNKNOWN_GPU, _publish_to, publish
from kvcached.ledger.waiting import wait_until_applied
from kvcached.policy import RetentionPolicy
from kvcached.values import MAX_LIMIT_TOKENS, MAX_REVISION, Bound, Outcome, Update

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcached.ledger.subscription import Subscription

    Subscribe = Callable[..., Subscription]


def desired(ledger_dir: Path) -> list[tuple[int, int]]:
    """Return the desired pairs of all members of all instances."""
    return [
        (member.revision, member.limit_tokens)
        for instance in get_instances(ledger_dir)
        for replica in instance.replicas
        for member in replica.members
    ]


@pytest.mark.parametrize("limit", [True, 1.0, "5", None, 5.5, [5]])
def test_limit_that_is_no_int(limit: object, ledger_dir: Path, subscribe: Subscribe) -> None:
    """Anything but an int is a TypeError, and nothing is published."""
    subscribe()
    with pytest.raises(TypeError, match="limit_tokens must be an int"):
        set_prefix_cache_retention_limit(limit, instance_name="engine", ledger_dir=ledger_dir)  # type: ignore[arg-type]
    assert desired(ledger_dir) == [(0, 16000)] * 2


@pytest.mark.parametrize("limit", [-2, MAX_LIMIT_TOKENS + 1, 2**63, -(2**70)])
def test_limit_out_of_range(limit: int, ledger_dir: Path, subscribe: Subscribe) -> None:
    """A limit that no word can carry is a ValueError, and nothing is published."""
    subscribe()
    with pytest.raises(ValueError, match="limit_tokens must be -1"):
        set_prefix_cache_retention_limit(limit, instance_name="engine", ledger_dir=ledger_dir)
    assert desired(ledger_dir) == [(0, 16000)] * 2


@pytest.mark.parametrize("limit", [-1, 0, 1, MAX_LIMIT_TOKENS])
def test_accepted_stands_in_every_member(limit: int, ledger_dir: Path, subscribe: Subscribe) -> None:
    """An accepted limit is stored in every member under the next revision, exactly as given."""
    subscribe(gpus=tuple(f"GPU-{index}" for index in range(8)))
    for revision in (1, 2):
        result = set_prefix_cache_retention_limit(limit, instance_name="engine", ledger_dir=ledger_dir)
        assert result.accepted
        assert (result.status, result.revision, result.limit_tokens) == ("accepted", revision, limit)
        assert {gpu.status for gpu in result.gpus} == {"published"}
        assert desired(ledger_dir) == [(revision, limit)] * 8


def test_result_is_frozen_and_json_ready(ledger_dir: Path, subscribe: Subscribe) -> None:
    """A result cannot be changed, and its dictionary survives JSON."""
    subscribe()
    result = set_prefix_cache_retention_limit(5, instance_name="engine", ledger_dir=str(ledger_dir))
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.status = "partial"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.gpus[0].status = "failed"  # type: ignore[misc]
    fields = json.loads(json.dumps(result.to_dict()))
    assert set(fields) == {
        "status", "instance_name", "bound", "limit_tokens", "revision", "accepted", "unchanged", "incarnation", "gpus",
        "warnings",
    }  # fmt: skip
    assert set(fields["gpus"][0]) == {"gpu", "replica", "status", "revision", "limit_tokens", "error"}


def test_no_such_instance_names_the_directory(ledger_dir: Path, subscribe: Subscribe) -> None:
    """An unknown name is unavailable, and the directory that was looked in is named."""
    subscribe()
    for directory in (ledger_dir, ledger_dir / "missing"):
        result = set_prefix_cache_retention_limit(5, instance_name="other", ledger_dir=directory)
        assert (result.status, result.revision, result.gpus) == ("unavailable", 0, ())
        assert str(directory) in result.warnings[0]


def test_other_instances_are_not_touched(ledger_dir: Path, subscribe: Subscribe) -> None:
    """Publishing to one instance leaves the slots of its neighbours on the same GPU as they are."""
    subscribe("a", gpus=("cpu-0",))
    other = subscribe("b", gpus=("cpu-0",))
    publish(5, "a", str(ledger_dir))
    assert desired(ledger_dir) == [(1, 5), (0, 16000)]
    assert poll_now(other) is None


def test_missing_member_is_partial_and_the_engine_keeps_its_limit(ledger_dir: Path, subscribe: Subscribe) -> None:
    """With one file gone the rest is written, the result says partial, and nothing is applied."""
    engine = subscribe(gpus=("cpu-0", "cpu-1", "cpu-2"))
    (ledger_dir / "cpu-1.ledger").unlink()
    result = publish(5, "engine", str(ledger_dir))
    assert (result.status, result.revision) == ("partial", 1)
    assert [(gpu.gpu, gpu.status) for gpu in result.gpus] == [
        ("cpu-0", "published"),
        ("cpu-2", "published"),
        (UNKNOWN_GPU, "failed"),
    ]
    assert poll_now(engine) is None


def test_split_is_shown_and_repaired_by_the_next_publication(ledger_dir: Path, subscribe: Subscribe) -> None:
    """What a publisher that died half-way left behind is a split, and the next publication heals it."""
    engine = subscribe()
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        handle = directory.open("cpu-0").handle
        index, slot = handle.live_slots()[0]
        handle.raise_desired(index, slot.incarnation, Update(7, 5))
    assert get_instances(ledger_dir)[0].replicas[0].split
    assert poll_now(engine) is None
    assert publish(6, "engine", str(ledger_dir)).revision == 8
    assert not get_instances(ledger_dir)[0].replicas[0].split
    assert poll_now(engine) == Update(8, 6)


def test_if_revision_publishes_on_a_match_only(ledger_dir: Path, subscribe: Subscribe) -> None:
    """With if_revision another highest revision means superseded, and nothing is written."""
    subscribe()
    assert publish(5, "engine", str(ledger_dir), if_revision=0).accepted
    result = publish(6, "engine", str(ledger_dir), if_revision=0)
    assert (result.status, result.revision) == ("superseded", 0)
    assert result.warnings == ("the instance's highest revision is 1, not 0: nothing was written",)
    assert desired(ledger_dir) == [(1, 5)] * 2
    assert publish(6, "engine", str(ledger_dir), if_revision=1).accepted
    assert "nothing was written" not in publish(6, "nobody", str(ledger_dir)).warnings[0]


def test_if_revision_means_the_highest_of_a_split(ledger_dir: Path, subscribe: Subscribe) -> None:
    """While members differ, if_revision is compared with the highest revision."""
    subscribe()
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        raise_member(directory, "cpu-0", Update(7, 5))
    assert publish(6, "engine", str(ledger_dir), if_revision=0).status == "superseded"
    assert publish(6, "engine", str(ledger_dir), if_revision=7).revision == 8


# What a publisher meets that looked before others wrote


def raise_member(directory: LedgerDirectory, gpu: str, update: Update) -> None:
    """Write into one member alone, as a publisher does that dies before it comes to the others."""
    handle = directory.open(gpu).handle
    index, slot = handle.live_slots()[0]
    assert handle.raise_desired(index, slot.incarnation, update)[0]


def publish_late(
    ledger_dir: Path, meanwhile: Callable[[LedgerDirectory, Addressees], object], *, may_restart: bool = True
) -> tuple[Update, list[str]]:
    """Publish 6 after looking and ``meanwhile``; return the pair that was taken and what came of each member."""
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        found = look_up(directory, "engine", Bound.LIMIT, None)
        assert isinstance(found, Addressees)
        meanwhile(directory, found)
        attempt = _publish_to(found, 6, note="", may_restart=may_restart)
        assert attempt is not None
        attempt.finish()
        return attempt.update, [result.status for result in attempt.results]


@pytest.mark.parametrize(("others", "revision"), [((5,), 2), ((6,), 2), ((5, 7), 3)])
def test_publisher_that_was_overtaken_takes_a_revision_of_its_own(
    others: tuple[int, ...], revision: int, ledger_dir: Path, subscribe: Subscribe
) -> None:
    """Whoever published in the meantime, even the same limit, the publication gets a newer revision everywhere."""
    subscribe()
    taken = publish_late(ledger_dir, lambda *_: [publish(limit, "engine", str(ledger_dir)) for limit in others])
    assert taken == (Update(revision, 6), ["published"] * 2)
    assert desired(ledger_dir) == [(revision, 6)] * 2


def test_overtaken_publisher_that_may_not_restart_writes_nothing(ledger_dir: Path, subscribe: Subscribe) -> None:
    """With if_revision a publication that was overtaken is superseded, and leaves the stored limit."""
    subscribe()
    taken = publish_late(ledger_dir, lambda *_: publish(5, "engine", str(ledger_dir)), may_restart=False)
    assert taken[1] == ["superseded"] * 2
    assert desired(ledger_dir) == [(1, 5)] * 2


@pytest.mark.parametrize(
    ("stands", "taken", "statuses"),
    [
        (Update(1, 6), Update(1, 6), ["published", "published"]),
        (Update(1, 5), Update(2, 6), ["published", "published"]),
        (Update(9, 5), Update(1, 6), ["published", "superseded"]),
    ],
    ids=["the same pair", "another limit", "a newer one"],
)
def test_what_stands_in_a_later_member_only(
    stands: Update, taken: Update, statuses: list[str], ledger_dir: Path, subscribe: Subscribe
) -> None:
    """The same pair is as good as written; an equal revision of another limit is avoided; a newer one is not undone."""
    subscribe()
    assert publish_late(ledger_dir, lambda directory, _: raise_member(directory, "cpu-1", stands)) == (taken, statuses)
    pair = (stands.revision, stands.limit_tokens) if statuses[1] == "superseded" else (taken.revision, 6)
    assert desired(ledger_dir) == [(taken.revision, 6), pair]


def test_newer_pair_in_the_first_member_only_is_overtaken_before_anything_is_written(
    ledger_dir: Path, subscribe: Subscribe
) -> None:
    """A publication that is on its way, or died on it, is met at the first member: this one goes above it."""
    subscribe()
    taken = publish_late(ledger_dir, lambda directory, _: raise_member(directory, "cpu-0", Update(9, 5)))
    assert taken == (Update(10, 6), ["published"] * 2)
    assert desired(ledger_dir) == [(10, 6)] * 2


def make_read_only(ledger_dir: Path, found: Addressees, index: int) -> None:
    """Let the publisher have one of its members open for reading only."""
    ledger = found.replicas[0].members[index].ledger
    ledger.handle.close()
    with LedgerDirectory(str(ledger_dir), writable=False) as directory:
        reading = directory.open(ledger.gpu)
        directory.detach(reading)
    ledger.handle = reading.handle


def test_member_that_cannot_be_written_does_not_keep_the_others(ledger_dir: Path, subscribe: Subscribe) -> None:
    """A failure at a later member is noted, and the members after it are written all the same."""
    subscribe(gpus=("cpu-0", "cpu-1", "cpu-2"))
    taken = publish_late(ledger_dir, lambda _, found: make_read_only(ledger_dir, found, 1))
    assert taken == (Update(1, 6), ["published", "failed", "published"])


def test_first_member_that_cannot_be_written_leaves_the_others_as_they_are(
    ledger_dir: Path, subscribe: Subscribe
) -> None:
    """Nobody but the first member decides whose a revision is, so without it no revision is written anywhere."""
    subscribe()
    taken = publish_late(ledger_dir, lambda _, found: make_read_only(ledger_dir, found, 0))
    assert taken == (Update(1, 6), ["failed", "failed"])
    assert desired(ledger_dir) == [(0, 16000)] * 2


def test_revision_does_not_get_two_limits_when_the_first_member_is_lost(ledger_dir: Path, subscribe: Subscribe) -> None:
    """After half a publication into a file that is then removed, the next publisher uses no revision twice."""
    subscribe()
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        raise_member(directory, "cpu-0", Update(1, 5))
    (ledger_dir / "cpu-0.ledger").unlink()
    result = publish(6, "engine", str(ledger_dir))
    assert (result.status, result.revision) == ("unavailable", 0)
    assert {member.limit_tokens for member in result.gpus} <= {16000, None}


def test_ledger_that_is_replaced_while_publishing_is_not_called_published(
    ledger_dir: Path, subscribe: Subscribe
) -> None:
    """What was written into a file that is gone from its place may never be seen: that member has failed."""
    subscribe()
    taken = publish_late(ledger_dir, lambda *_: (ledger_dir / "cpu-0.ledger").unlink())
    assert taken[1] == ["failed", "published"]


def test_revisions_can_run_out(ledger_dir: Path, subscribe: Subscribe) -> None:
    """After the last revision nothing wraps: the result says that they are used up."""
    subscribe(gpus=("cpu-0",))
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        handle = directory.open("cpu-0").handle
        index, slot = handle.live_slots()[0]
        handle.raise_desired(index, slot.incarnation, Update(MAX_REVISION - 1, 5))
    assert publish(6, "engine", str(ledger_dir)).revision == MAX_REVISION
    result = publish(7, "engine", str(ledger_dir))
    assert result.status == "unavailable"
    assert "is the last" in result.warnings[0]


def test_a_word_is_only_ever_raised(ledger_dir: Path, subscribe: Subscribe) -> None:
    """Raising to an equal or lower revision changes nothing and returns what is stored there."""
    subscribe(gpus=("cpu-0",))
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        handle = directory.open("cpu-0").handle
        index, slot = handle.live_slots()[0]
        assert handle.raise_desired(index, slot.incarnation, Update(7, 5)) == (True, Update(0, 16000))
        for stale in (Update(7, 6), Update(6, 5), Update(7, 5)):
            assert handle.raise_desired(index, slot.incarnation, stale) == (False, Update(7, 5))


def test_slot_of_a_successor_is_not_written(ledger_dir: Path, subscribe: Subscribe) -> None:
    """A publisher that looked before an engine restarted cannot write into the new engine's slot."""
    old = subscribe(gpus=("cpu-0",))
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        handle = directory.open("cpu-0").handle
        index, slot = handle.live_slots()[0]
        old.close()
        subscribe("successor", gpus=("cpu-0",))
        with pytest.raises(ProcessLookupError):
            handle.raise_desired(index, slot.incarnation, Update(1, 5))
    assert desired(ledger_dir) == [(0, 16000)]


def test_two_live_engines_of_one_name_are_said(
    ledger_dir: Path, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines that both claim one name are not published to, and both pids are named."""
    subscribe(gpus=("cpu-0",))
    monkeypatch.setattr("kvcached.ledger.registration._find_holder", lambda *_, **__: None)
    subscribe(gpus=("cpu-1",))
    result = publish(5, "engine", str(ledger_dir))
    assert result.status == "unavailable"
    assert "two live engines are named 'engine'" in result.warnings[0]


def test_advice_comes_with_the_result(ledger_dir: Path, subscribe: Subscribe) -> None:
    """A limit below one block, one above the capacity, and an engine that will not apply it are pointed out."""
    engine = subscribe()
    policy = RetentionPolicy(ToyCache(), 16000)
    engine.acknowledge(policy.report())
    assert "keeps one block, 16 tokens" in publish(5, "engine", str(ledger_dir)).warnings[0]
    assert "has no effect" in publish(2_000_000, "engine", str(ledger_dir)).warnings[0]
    for fitting in (0, 16, 64, 1_000_000):
        assert publish(fitting, "engine", str(ledger_dir)).warnings == ()
    policy.reject(Update(9, 5), Outcome.UNSUPPORTED_ENGINE, "hook target gone")
    engine.acknowledge(policy.report())
    assert "will not apply it: hook target gone" in publish(64, "engine", str(ledger_dir)).warnings[0]


def test_publication_leaves_a_record(ledger_dir: Path, subscribe: Subscribe) -> None:
    """The ledger records who published what, over what and why, for the last 64 publications."""
    subscribe(gpus=("cpu-0",))
    for limit in range(72):
        publish(limit, "engine", str(ledger_dir), note=f"step {limit}")
    with LedgerDirectory(str(ledger_dir), writable=False) as directory:
        records = directory.open("cpu-0").handle.audits()
    assert [record.after for record in records] == [Update(limit + 1, limit) for limit in range(71, 7, -1)]
    newest = records[0]
    assert (newest.before, newest.uid, newest.pid) == (Update(71, 70), os.getuid(), os.getpid())
    assert (newest.instance_name, newest.note) == ("engine", "step 71")


@pytest.mark.parametrize(
    ("arguments", "program"),
    [([], "python"), ([""], "python"), (["/x/serve.py", "a"], "serve.py"), (["/x/__main__.py"], "x")],
)
def test_record_names_the_program(
    arguments: list[str], program: str, ledger_dir: Path, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a publication says which program published."""
    subscribe(gpus=("cpu-0",))
    monkeypatch.setattr("sys.argv", arguments)
    publish(5, "engine", str(ledger_dir))
    with LedgerDirectory(str(ledger_dir), writable=False) as directory:
        assert directory.open("cpu-0").handle.audits()[0].program == program


def test_publishers_at_the_same_moment_converge(ledger_dir: Path, subscribe: Subscribe) -> None:
    """Publishers that race all return, all members end equal, and the engine gets the newest."""
    seed = random.randrange(2**32)
    print("seed", seed)
    engine = subscribe(gpus=tuple(f"cpu-{index}" for index in range(8)))
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        jobs = [(str(ledger_dir), seed + index, 50) for index in range(4)]
        statuses = {status for result in pool.starmap(publish_many, jobs) for status in result}
    assert statuses <= {"accepted", "superseded"}
    pairs = set(desired(ledger_dir))
    assert len(pairs) == 1
    update = poll_now(engine)
    assert update is not None
    assert (update.revision, update.limit_tokens) == pairs.pop()
    assert update.revision >= 200


def serve(engine: Subscription, policy: RetentionPolicy, stop: threading.Event) -> None:
    while not stop.wait(0.005):
        settle(engine, policy)


def test_wait_ends_when_the_excess_is_gone(ledger_dir: Path, subscribe: Subscribe) -> None:
    """Waiting ends with applied once the engine holds no more than the limit, and shows the excess shrinking."""
    engine = subscribe()
    policy = RetentionPolicy(ToyCache(idle=3200), -1, chunk_tokens=160)
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(engine, policy, stop))
    thread.start()
    seen: list[int] = []
    try:
        result = publish(0, "engine", str(ledger_dir))
        result = wait_until_applied(result, str(ledger_dir), 30, lambda progress: seen.append(progress.excess_tokens))
    finally:
        stop.set()
        thread.join()
    assert result.applied
    assert result.waited_s is not None
    assert get_instances(ledger_dir)[0].replicas[0].idle_tokens == 0
    shrinking = [excess for excess in seen if excess]
    assert shrinking == sorted(shrinking, reverse=True)
    assert len(set(shrinking)) > 2


def test_wait_says_who_lags_when_the_time_is_over(ledger_dir: Path, subscribe: Subscribe) -> None:
    """A wait that runs out names the replica and whether it has not applied the limit or cannot evict."""
    engine = subscribe()
    cache = ToyCache(idle=160)
    cache.evictable = False
    policy = RetentionPolicy(cache, -1)
    result = set_prefix_cache_retention_limit(0, instance_name="engine", ledger_dir=ledger_dir, wait=0.05)
    assert (result.applied, result.accepted) == (False, True)
    assert "replica 0 has not applied it yet" in result.warnings[-1]
    settle(engine, policy)
    result = wait_until_applied(result, str(ledger_dir), 0.05)
    assert "still holds 160 idle tokens: held" in result.warnings[-1]


def test_wait_ends_at_once_with_a_rejection(ledger_dir: Path, subscribe: Subscribe) -> None:
    """An engine that will not apply the limit ends the wait, with its reason."""
    engine = subscribe(pp_size=2)
    policy = RetentionPolicy(ToyCache(), 16000)
    result = publish(0, "engine", str(ledger_dir))
    policy.reject(Update(1, 0), Outcome.REJECTED_PIPELINE_PARALLEL, "pp_size is 2")
    engine.acknowledge(policy.report())
    result = wait_until_applied(result, str(ledger_dir), 60)
    assert result.applied is False
    assert [(rejection.replica, rejection.reason) for rejection in result.rejections] == [
        (0, "rejected_pipeline_parallel: pp_size is 2")
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.rejections[0].reason = ""  # type: ignore[misc]


def test_wait_ends_when_a_newer_publication_decides(ledger_dir: Path, subscribe: Subscribe) -> None:
    """A publication that was overtaken before it was applied is superseded."""
    engine = subscribe()
    first = publish(0, "engine", str(ledger_dir))
    publish(5, "engine", str(ledger_dir))
    settle(engine, RetentionPolicy(ToyCache(), -1))
    assert wait_until_applied(first, str(ledger_dir), 60).status == "superseded"


def test_wait_notices_that_the_engine_ended(ledger_dir: Path, subscribe: Subscribe) -> None:
    """An engine that ends while it is waited for ends the wait."""
    engine = subscribe()
    result = publish(0, "engine", str(ledger_dir))
    engine.close()
    result = wait_until_applied(result, str(ledger_dir), 60)
    assert result.applied is False
    assert "replica 0 ended during the wait" in result.warnings[-1]
