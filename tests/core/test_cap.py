"""The cap: a second desired word in each slot, under the same rules as the limit, that never mixes with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from support.capped import CappedPolicy
from support.toys import ToyCache, identity, poll_now

from kvcached.control import get_instances, set_kv_capacity_limit, set_prefix_cache_retention_limit
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.publication import publish
from kvcached.ledger.subscription import Subscription
from kvcached.light_dataclasses import replace
from kvcached.policy import RetentionPolicy
from kvcached.settings import SettingsError, read_settings
from kvcached.values import NO_CAP_REASON, Bound, BoundReport, Outcome, Update

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPUS = ("cpu-0", "cpu-1")


class CappedEngine:
    """A subscription and what it hands out applied, stepped by hand."""

    def __init__(self, ledger_dir: Path, *, startup_cap: int = -1) -> None:
        whoever = replace(identity(), startup_cap_tokens=startup_cap)
        self.policy = CappedPolicy(whoever, idle=1000)
        self.subscription = Subscription(whoever, GPUS, str(ledger_dir))
        self.subscription.start()
        self.subscription.acknowledge(self.policy.report())

    def step(self) -> Update | None:
        """Do what an engine does at one step; return the update it took."""
        update = poll_now(self.subscription)
        if update is not None:
            self.take(update)
        return update

    def take(self, update: Update) -> None:
        """Apply an update and report it."""
        self.policy.update(update)
        self.subscription.acknowledge(self.policy.report())

    def say(self, cap: BoundReport) -> None:
        """Report something else of the cap."""
        self.policy.cap = cap
        self.subscription.acknowledge(self.policy.report())


@pytest.fixture
def engine(ledger_dir: Path) -> Iterator[CappedEngine]:
    """Start an engine that knows caps."""
    started = CappedEngine(ledger_dir, startup_cap=50_000)
    yield started
    started.subscription.close()


def cap(tokens: int, ledger_dir: Path, **conditions: int) -> int:
    """Publish a cap; return its revision."""
    result = publish(tokens, "engine", str(ledger_dir), bound=Bound.CAP, **conditions)  # type: ignore[arg-type]
    assert result.accepted, result
    return result.revision


def words(ledger_dir: Path) -> list[tuple[Update, Update]]:
    """Return both desired pairs of all members."""
    with LedgerDirectory(str(ledger_dir), writable=False) as directory:
        slots = [slot for ledger in directory.open_all() for _, slot in ledger.handle.live_slots()]
    return [(slot.desired, slot.desired_cap) for slot in slots]


def test_two_words_have_revisions_of_their_own(engine: CappedEngine, ledger_dir: Path) -> None:
    """Publishing one bound takes the next revision of that bound, and leaves the other as it is."""
    startup, first = Update(0, 16000), Update(1, 70, Bound.CAP)
    assert words(ledger_dir) == [(startup, Update(0, 50_000, Bound.CAP))] * 2
    assert [cap(tokens, ledger_dir) for tokens in (70,)] == [1]
    assert words(ledger_dir) == [(startup, first)] * 2
    assert [publish(limit, "engine", str(ledger_dir)).revision for limit in (5, 6, 7)] == [1, 2, 3]
    assert words(ledger_dir) == [(Update(3, 7), first)] * 2
    assert cap(71, ledger_dir) == 2
    assert {engine.step(), engine.step()} == {Update(3, 7), Update(2, 71, Bound.CAP)}
    assert engine.step() is None


def test_conditions_are_of_the_bound_that_is_published(engine: CappedEngine, ledger_dir: Path) -> None:
    """if_revision and if_different compare with the word that is published, whatever the other one says."""
    assert engine.subscription.registered
    publish(70, "engine", str(ledger_dir))
    assert cap(70, ledger_dir, if_revision=0) == 1
    refused = publish(71, "engine", str(ledger_dir), bound=Bound.CAP, if_revision=0)
    assert refused.status == "superseded"
    assert "highest revision of the cap is 1, not 0" in refused.warnings[0]
    unchanged = publish(70, "engine", str(ledger_dir), bound=Bound.CAP, if_different=True)
    assert (unchanged.unchanged, unchanged.revision) == (True, 1)
    assert cap(5, ledger_dir, if_different=True) == 2


def test_both_pending_are_handed_out_one_after_the_other(engine: CappedEngine, ledger_dir: Path) -> None:
    """Of two unsettled updates one is polled until it is settled, then the other; a newer one keeps its turn."""
    publish(5, "engine", str(ledger_dir))
    cap(70, ledger_dir)
    first = poll_now(engine.subscription)
    assert first is not None
    assert poll_now(engine.subscription) == first
    engine.take(first)
    second = engine.subscription.poll()
    assert second is not None
    assert {first.bound, second.bound} == set(Bound)
    publish(6, "engine", str(ledger_dir))
    cap(71, ledger_dir)
    assert poll_now(engine.subscription) == Update(2, 71 if second.bound is Bound.CAP else 6, second.bound)


def test_a_stream_of_limits_does_not_keep_a_cap_waiting(engine: CappedEngine, ledger_dir: Path) -> None:
    """A cap is handed out although a newer limit is there each time the engine has settled the last one."""
    cap(70, ledger_dir)
    taken = []
    for limit in range(4):
        publish(limit, "engine", str(ledger_dir))
        taken.append(engine.step())
    assert Update(1, 70, Bound.CAP) in taken[:2]


def test_an_engine_without_caps_never_gets_one(ledger_dir: Path) -> None:
    """A cap is not handed to an engine that knows none, not even before its first report, and who waits is told."""
    subscription = Subscription(identity(), GPUS, str(ledger_dir))
    subscription.start()
    policy = RetentionPolicy(ToyCache(), 16000)
    result = publish(70, "engine", str(ledger_dir), bound=Bound.CAP)
    assert poll_now(subscription) is None
    subscription.acknowledge(policy.report())
    assert poll_now(subscription) is None
    (replica,) = get_instances(ledger_dir)[0].replicas
    assert (replica.cap.outcome, replica.cap.reason) == (Outcome.UNSUPPORTED_ENGINE, NO_CAP_REASON)
    assert (replica.cap.settled_revision, replica.cap.applied) == (result.revision, Update(0, -1, Bound.CAP))
    waited = set_kv_capacity_limit(80, instance_name="engine", ledger_dir=ledger_dir, wait=30)
    assert not waited.applied
    assert NO_CAP_REASON in waited.rejections[0].reason
    assert NO_CAP_REASON in waited.warnings[0]
    publish(5, "engine", str(ledger_dir))
    assert poll_now(subscription) == Update(1, 5)
    subscription.close()


def test_a_cap_without_sense_is_rejected_and_the_limit_goes_on(engine: CappedEngine, ledger_dir: Path) -> None:
    """A hostile cap is rejected as invalid; the limit's outcome stays, and the next cap is applied."""
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        for ledger in directory.open_all():
            for index, slot in ledger.handle.live_slots():
                assert ledger.handle.raise_desired(index, slot.incarnation, Update(5, -7, Bound.CAP))[0]
    publish(5, "engine", str(ledger_dir))
    assert engine.step() == Update(1, 5)
    (replica,) = get_instances(ledger_dir)[0].replicas
    assert (replica.outcome, replica.cap.outcome) == (Outcome.APPLIED, Outcome.REJECTED_INVALID)
    assert "invalid cap -7" in replica.cap.reason
    assert cap(70, ledger_dir) == 6
    assert engine.step() == Update(6, 70, Bound.CAP)


def test_waiting_for_a_cap_waits_for_the_engine_to_say_applied(engine: CappedEngine, ledger_dir: Path) -> None:
    """A cap that is taken over and not yet returned is no end of a wait; one that is applied is."""
    revision = cap(70, ledger_dir)
    pair = Update(revision, 70, Bound.CAP)
    engine.say(BoundReport(pair, revision, Outcome.APPLYING, "requests hold 900 tokens"))
    held = set_kv_capacity_limit(70, instance_name="engine", ledger_dir=ledger_dir, wait=0.3, if_different=True)
    assert (held.applied, held.unchanged) == (False, True)
    assert "still holds 1000 tokens, 0 bytes resident: applying (requests hold 900 tokens)" in held.warnings[0]
    engine.say(BoundReport(pair, revision, Outcome.APPLIED, ""))
    assert set_kv_capacity_limit(70, instance_name="engine", ledger_dir=ledger_dir, wait=30, if_different=True).applied


def test_a_cap_below_the_floor_ends_a_wait(engine: CappedEngine, ledger_dir: Path) -> None:
    """Who waits for a cap that the engine rejects is told the engine's own reason."""
    revision = cap(70, ledger_dir)
    reason = "one request of the longest length needs 4096 tokens"
    engine.say(BoundReport(engine.policy.cap.applied, revision, Outcome.REJECTED_BELOW_FLOOR, reason))
    result = set_kv_capacity_limit(70, instance_name="engine", ledger_dir=ledger_dir, wait=30, if_different=True)
    assert (result.applied, result.rejections[0].reason) == (False, f"rejected_below_floor: {reason}")


def test_a_lost_ledger_loses_neither_word(engine: CappedEngine, ledger_dir: Path) -> None:
    """After a ledger was removed both words go on where they were, and the new slots are never without their report."""
    publish(5, "engine", str(ledger_dir))
    cap(70, ledger_dir)
    while engine.step() is not None:
        pass
    publish(6, "engine", str(ledger_dir))  # on its way when the ledger is lost
    (ledger_dir / "cpu-1.ledger").unlink()
    deadline = time.monotonic() + 30
    seen: list[tuple[Update, Update]] = []
    while len(seen) < len(GPUS) and time.monotonic() < deadline:
        seen = [pair for pair in words(ledger_dir) if pair == (Update(2, 6), Update(1, 70, Bound.CAP))]
        for instance in get_instances(ledger_dir):
            assert all(replica.report_age_s is not None for replica in instance.replicas)
            assert {replica.cap.applied for replica in instance.replicas} <= {Update(1, 70, Bound.CAP)}
    assert len(seen) == len(GPUS)
    assert engine.step() == Update(2, 6)
    assert cap(71, ledger_dir) == 2
    assert engine.step() == Update(2, 71, Bound.CAP)


def test_members_that_differ_in_the_cap_are_split(engine: CappedEngine, ledger_dir: Path) -> None:
    """A cap that reached one member only shows as a split, is not applied, and the next publication repairs it."""
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        handle = directory.open("cpu-0").handle
        index, slot = handle.live_slots()[0]
        assert handle.raise_desired(index, slot.incarnation, Update(4, 70, Bound.CAP))[0]
    (replica,) = get_instances(ledger_dir)[0].replicas
    assert replica.split
    assert engine.step() is None
    assert cap(80, ledger_dir) == 5
    assert engine.step() == Update(5, 80, Bound.CAP)
    assert not get_instances(ledger_dir)[0].replicas[0].split


def test_reports_of_memory_come_back(engine: CappedEngine, ledger_dir: Path) -> None:
    """What an engine says of its memory is what status shows, in the contract's fields."""
    full = replace(
        engine.policy.report(), resident_bytes=3000, returned_bytes=1096, returns="GPU memory is not returned"
    )
    engine.subscription.acknowledge(full)
    fields = get_instances(ledger_dir)[0].replicas[0].to_dict()
    assert fields["cap"] == {"revision": 0, "limit_tokens": 50_000, "outcome": "startup", "reason": ""}
    names = ("token_bytes", "pool_bytes", "resident_bytes", "returned_bytes", "returns", "startup_cap_tokens")
    assert [fields[name] for name in names] == [1024, 4096, 3000, 1096, "GPU memory is not returned", 50_000]
    assert fields["members"][0]["cap"] == {"revision": 0, "limit_tokens": 50_000}


def test_both_functions_publish_their_own_word(engine: CappedEngine, ledger_dir: Path) -> None:
    """The two Python functions differ in the word alone, and their results say which."""
    of_cap = set_kv_capacity_limit(70, instance_name="engine", ledger_dir=ledger_dir)
    of_limit = set_prefix_cache_retention_limit(5, instance_name="engine", ledger_dir=ledger_dir)
    assert engine.subscription.registered
    assert (of_cap.to_dict()["bound"], of_limit.to_dict()["bound"]) == ("cap", "limit")
    assert words(ledger_dir) == [(Update(1, 5), Update(1, 70, Bound.CAP))] * 2
    with pytest.raises(TypeError, match="must be an int"):
        set_kv_capacity_limit(True, instance_name="engine", ledger_dir=ledger_dir)


@pytest.mark.parametrize(("text", "tokens"), [("", -1), ("16k", 16000), ("-5", -1), ("unlimited", -1), ("0", 0)])
def test_startup_cap(text: str, tokens: int) -> None:
    """A startup cap is written as the startup limit is, and unset it is the whole pool."""
    settings = read_settings("toy", {"KVCACHED_MAX_KV_TOKENS": text})
    assert (settings.startup_cap_tokens, settings.startup_limit_tokens) == (tokens, -1)


def test_startup_cap_that_is_none() -> None:
    """A startup cap that is no number is one clear error that names the variable."""
    with pytest.raises(SettingsError, match="KVCACHED_MAX_KV_TOKENS='a lot' is not a number of tokens"):
        read_settings("toy", {"KVCACHED_MAX_KV_TOKENS": "a lot"})
