"""The engine's side: what poll returns when, and how a registration survives what happens to the files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.toys import ToyCache, identity, settle

from kvcached import _native
from kvcached.instances import get_instances
from kvcached.ledger import LedgerDirectory
from kvcached.policy import RetentionPolicy
from kvcached.publication import publish
from kvcached.registration import InstanceNameTakenError
from kvcached.subscription import Subscription
from kvcached.values import Outcome, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Holder = subprocess.Popen[str]

REGISTERS_AGAIN_S = 2.0
PATIENCE_S = 20.0  # for a loaded machine; what is promised is asserted with its own figure

HOLD_A_SLOT = """
import sys, time
from kvcached.subscription import Subscription
from support.toys import identity
subscription = Subscription(identity(sys.argv[2]), ["cpu-0", "cpu-1"], sys.argv[1])
subscription.start()
print("ready", flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, and fail if it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def names(ledger_dir: Path) -> list[str]:
    return [instance.name for instance in get_instances(ledger_dir)]


@contextmanager
def holder(ledger_dir: Path, name: str, *, code: str = HOLD_A_SLOT, prefix: Sequence[str] = ()) -> Iterator[Holder]:
    """Run a process that registers and sleeps; it is killed at the end, if it still lives."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONWARNINGS": "ignore"}
    command = [*prefix, sys.executable, "-c", code, str(ledger_dir), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def raw_raise(ledger_dir: Path, gpu: str, update: Update) -> None:
    """Write one member's word as a publisher that dies right afterwards would."""
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        handle = directory.open(gpu).handle
        index, slot = handle.live_slots()[0]
        assert handle.raise_desired(index, slot.incarnation, update)[0]


def test_nothing_published_is_nothing_to_poll(subscribe: Callable[..., Subscription]) -> None:
    """A fresh registration has nothing to apply, whatever its startup limit."""
    for name, startup in (("a", 16000), ("b", 0), ("c", -1)):
        assert subscribe(name, startup=startup).poll() is None


def test_poll_returns_an_update_until_it_is_settled(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """An update comes again and again until the engine acknowledges it, and never afterwards."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(), 16000)
    publish(7, "engine", str(ledger_dir))
    assert subscription.poll() == subscription.poll() == Update(1, 7)
    settle(subscription, policy)
    assert subscription.poll() is None
    assert get_instances(ledger_dir)[0].replicas[0].applied == Update(1, 7)


def test_applied_updates_are_logged_once_each_in_words(
    subscribe: Callable[..., Subscription], ledger_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each applied update, no limit and limit 0 among them, leaves one line, however often figures are reported."""
    caplog.set_level("INFO", logger="kvcached")
    subscription = subscribe()
    cache = ToyCache()
    policy = RetentionPolicy(cache, 16000)
    for limit in (-1, 0, 7):
        publish(limit, "engine", str(ledger_dir))
        assert subscription.poll() == Update(policy.settled_revision + 1, limit)
        settle(subscription, policy)
        cache.active += 16
        subscription.acknowledge(policy.report())
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("revision")]
    assert said == [
        "revision 1 applied: no limit, 0 idle",
        "revision 2 applied: limit 0 tokens, 0 idle",
        "revision 3 applied: limit 7 tokens, 0 idle",
    ]


def test_half_a_publication_is_not_taken_and_completes_later(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """A publication met half-way is not applied, is looked at again, and is applied once it stands in all members."""
    subscription = subscribe()
    raw_raise(ledger_dir, "cpu-1", Update(1, 7))  # the last member first, as no honest publisher would
    assert subscription.poll() is None
    raw_raise(ledger_dir, "cpu-0", Update(1, 7))
    assert subscription.poll() == Update(1, 7)


def test_equal_revision_with_another_limit_is_no_match(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """Members that agree on the revision but not on the limit are not taken; the next publication repairs them."""
    subscription = subscribe()
    raw_raise(ledger_dir, "cpu-0", Update(1, 7))
    raw_raise(ledger_dir, "cpu-1", Update(1, 8))
    assert subscription.poll() is None
    assert get_instances(ledger_dir)[0].replicas[0].split
    assert publish(9, "engine", str(ledger_dir)).accepted
    assert subscription.poll() == Update(2, 9)


def test_senseless_word_is_rejected_and_the_next_is_taken(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """A limit below -1 is never offered, is acknowledged as invalid, and does not block the next publication."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(), 16000)
    subscription.acknowledge(policy.report())
    for gpu in ("cpu-0", "cpu-1"):
        raw_raise(ledger_dir, gpu, Update(1, -7))
    assert subscription.poll() is None
    replica = get_instances(ledger_dir)[0].replicas[0]
    assert (replica.outcome, replica.settled_revision) == (Outcome.REJECTED_INVALID, 1)
    assert replica.applied == Update(0, 16000)
    publish(5, "engine", str(ledger_dir))
    settle(subscription, policy)
    replica = get_instances(ledger_dir)[0].replicas[0]
    assert (replica.outcome, replica.applied) == (Outcome.APPLIED, Update(2, 5))


def test_same_name_twice_fails_and_says_who_has_it(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """The second engine of a name is refused with the first one's pid, also on other GPUs."""
    subscribe()
    for gpus in (("cpu-0", "cpu-1"), ("cpu-7",)):
        second = Subscription(identity(), gpus, str(ledger_dir))
        with pytest.raises(InstanceNameTakenError, match=f"pid {os.getpid()}"):
            second.start()


def test_replicas_of_one_instance_share_a_ledger(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """Two replicas register side by side and take the same publication."""
    replicas = [subscribe(replica=index, gpus=(f"cpu-{index}",)) for index in (0, 1)]
    assert publish(3, "engine", str(ledger_dir)).accepted
    assert [replica.poll() for replica in replicas] == [Update(1, 3)] * 2


def test_killed_engine_is_dead_at_once_and_its_name_is_free(ledger_dir: Path) -> None:
    """SIGKILL frees name and slots for everybody, at once and without any clean-up."""
    for _ in range(3):
        with holder(ledger_dir, "engine") as process:
            assert names(ledger_dir) == ["engine"]
            process.kill()
            process.wait()
            assert names(ledger_dir) == []
            assert publish(1, "engine", str(ledger_dir)).status == "unavailable"


@pytest.mark.skipif(os.getuid() != 0, reason="a PID namespace needs root")
def test_liveness_across_pid_namespaces(ledger_dir: Path) -> None:
    """Two engines that are both pid 1 of their namespaces are two live slots, and die one by one for everybody."""
    unshare = ("unshare", "--pid", "--fork", "--kill-child")
    with holder(ledger_dir, "a", prefix=unshare) as first, holder(ledger_dir, "b", prefix=unshare):
        assert {(instance.name, instance.pid) for instance in get_instances(ledger_dir)} == {("a", 1), ("b", 1)}
        first.kill()
        first.wait()
        until(lambda: names(ledger_dir) == ["b"])


FORK_A_CHILD = (
    HOLD_A_SLOT.replace("time.sleep(600)", "")
    + """
import os
from kvcached.policy import RetentionPolicy
from support.toys import ToyCache
child = os.fork()
if child == 0:
    subscription.acknowledge(RetentionPolicy(ToyCache(idle=77), 5).report())
    os.kill(os.getpid(), 19)
print(os.waitpid(child, os.WUNTRACED)[0], flush=True)
time.sleep(600)
"""
)


def test_forked_child_owns_nothing_and_keeps_nothing_alive(ledger_dir: Path) -> None:
    """A child of an engine cannot acknowledge, and does not keep the engine's slot alive when the engine dies."""
    with holder(ledger_dir, "engine", code=FORK_A_CHILD) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert get_instances(ledger_dir)[0].replicas[0].idle_tokens == 0
            process.kill()
            process.wait()
            assert names(ledger_dir) == []
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_full_table_is_said_and_a_dead_slot_is_taken_again(
    ledger_dir: Path, subscribe: Callable[..., Subscription], caplog: pytest.LogCaptureFixture
) -> None:
    """The 65th engine says that the table is full and serves on; it registers by itself when a slot is free."""
    engines = [subscribe(f"engine-{index}", gpus=("cpu-0",)) for index in range(64)]
    late = subscribe("late", gpus=("cpu-0",))
    assert not late.registered
    assert late.poll() is None
    assert "all 64 slots belong to live engines" in caplog.text
    engines[5].close()
    until(lambda: late.registered)
    assert "late" in names(ledger_dir)


@pytest.mark.parametrize("damage", ["unlink", "replace", "truncate and unlink", "remove directory"])
def test_lost_ledger_is_registered_again(damage: str, subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """A removed, replaced or truncated ledger leads to a new registration that keeps pair and report."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(idle=160), 16000)
    publish(64, "engine", str(ledger_dir))
    settle(subscription, policy)
    started = time.monotonic()
    path = ledger_dir / "cpu-1.ledger"
    if damage == "unlink":
        path.unlink()
    elif damage == "replace":
        shutil.copy(path, ledger_dir / "copy")
        (ledger_dir / "copy").rename(path)
    elif damage == "truncate and unlink":
        os.truncate(path, 0)
        subscription.poll()
        path.unlink()
    else:
        shutil.rmtree(ledger_dir)
    assert not publish(32, "engine", str(ledger_dir)).accepted
    until(lambda: ledger_dir.exists() and [i.replicas[0].split for i in get_instances(ledger_dir)] == [False])
    assert time.monotonic() - started < REGISTERS_AGAIN_S
    replica = get_instances(ledger_dir)[0].replicas[0]
    assert (replica.applied, replica.outcome) == (Update(1, 64), Outcome.APPLIED)
    assert subscription.poll() is None
    assert publish(16, "engine", str(ledger_dir)).revision == 2
    assert settle(subscription, policy).idle_tokens == 16


def test_truncated_ledger_does_not_end_the_process(
    subscribe: Callable[..., Subscription], ledger_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file cut to nothing under the mapping raises no SIGBUS: polls go on, and control is said to be lost."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(), 16000)
    os.truncate(ledger_dir / "cpu-1.ledger", 0)
    for _ in range(1000):
        subscription.poll()
        subscription.acknowledge(policy.report())
        policy.update(Update(policy.settled_revision + 1, 5))
    until(lambda: not subscription.registered)
    until(lambda: "is 0 bytes long" in caplog.text)


def test_publication_confirmed_before_a_loss_is_not_forgotten(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """What was accepted just before the files vanished is offered after the new registration."""
    subscription = subscribe()
    assert publish(5, "engine", str(ledger_dir)).accepted
    shutil.rmtree(ledger_dir)
    until(lambda: ledger_dir.exists() and names(ledger_dir) == ["engine"])
    assert subscription.poll() == Update(1, 5)
    assert get_instances(ledger_dir)[0].replicas[0].members[0].limit_tokens == 5


def test_missing_directory_is_one_warning_and_registers_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine starts without its ledger directory, warns once, and registers when the directory appears."""
    directory = tmp_path / "not" / "there"
    subscription = Subscription(identity(), ["cpu-0"], str(directory))
    started = time.monotonic()
    subscription.start()
    assert time.monotonic() - started < 1.0
    assert subscription.poll() is None
    time.sleep(1.5)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    directory.mkdir(parents=True, mode=0o700)
    until(lambda: subscription.registered)
    subscription.close()


def test_held_registration_lock_delays_nobody_for_long(
    ledger_dir: Path, subscribe: Callable[..., Subscription]
) -> None:
    """A process that sits on the registration lock, as a stopped one would, does not keep others from registering."""
    with LedgerDirectory(str(ledger_dir), writable=True) as stopped:
        stopped.lock(time.monotonic())
        started = time.monotonic()
        assert subscribe().registered
        assert time.monotonic() - started < 1.0


def test_idle_engine_is_woken_by_the_doorbell(ledger_dir: Path) -> None:
    """The watcher calls the engine when something was published, and leaves it alone otherwise."""
    woken = threading.Event()
    subscription = Subscription(identity(), ["cpu-0"], str(ledger_dir), on_publication=woken.set)
    subscription.start()
    time.sleep(0.1)
    assert not woken.is_set()
    publish(5, "engine", str(ledger_dir))
    assert woken.wait(PATIENCE_S)
    subscription.close()


def test_wait_ends_with_a_publication_or_at_the_deadline(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """An engine that sleeps in wait is woken by a publication, and by nothing else before its deadline."""
    subscription = subscribe()
    assert not subscription.wait(time.monotonic() + 0.05)
    threading.Timer(0.05, publish, (5, "engine", str(ledger_dir))).start()
    assert subscription.wait(time.monotonic() + PATIENCE_S)
    assert subscription.poll() == Update(1, 5)


def test_wait_of_an_engine_without_a_registration(tmp_path: Path) -> None:
    """Without a ledger directory a wait lasts until its deadline; a longer one ends with a publication."""
    directory = tmp_path / "not" / "there"
    subscription = Subscription(identity(), ["cpu-0"], str(directory))
    subscription.start()
    deadline = time.monotonic() + 0.1
    assert subscription.wait(deadline) is False
    assert time.monotonic() >= deadline
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(subscription.wait(time.monotonic() + PATIENCE_S)))
    waiter.start()
    directory.mkdir(parents=True, mode=0o700)
    until(lambda: subscription.registered)
    assert publish(5, "engine", str(directory)).accepted
    waiter.join()
    assert answers == [True]
    subscription.close()


def test_woken_engine_is_registered_again_too(ledger_dir: Path) -> None:
    """An engine that is woken by the watcher registers again after its ledger was removed, and is woken from there."""
    woken = threading.Event()
    subscription = Subscription(identity(), ["cpu-0"], str(ledger_dir), on_publication=woken.set)
    subscription.start()
    (ledger_dir / "cpu-0.ledger").unlink()
    until(lambda: names(ledger_dir) == ["engine"])
    publish(5, "engine", str(ledger_dir))
    assert woken.wait(PATIENCE_S)
    subscription.close()


def test_process_ends_without_closing_its_subscription(ledger_dir: Path) -> None:
    """The watcher does not keep an interpreter from ending, and the slot is free then."""
    code = HOLD_A_SLOT.replace("time.sleep(600)", "")
    with holder(ledger_dir, "engine", code=code) as process:
        assert process.wait(PATIENCE_S) == 0
    assert names(ledger_dir) == []


def test_a_waiting_thread_does_not_hold_the_interpreter(subscribe: Callable[..., Subscription]) -> None:
    """While one thread sleeps on the doorbell, another one keeps counting."""
    subscription = subscribe()
    waiter = threading.Thread(target=subscription.wait, args=(time.monotonic() + 0.5,))
    waiter.start()
    count = 0
    while waiter.is_alive():
        count += 1
    assert count > 1000


def test_leftovers_of_killed_creations_are_swept(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """A temporary file of a creation that was killed is removed by the next registration, and nothing else is."""
    leftover = ledger_dir / ".cpu-0.ledger.0123456789abcdef.new"
    leftover.write_bytes(b"")
    (ledger_dir / "notes.txt").write_text("mine")
    subscribe()
    assert sorted(path.name for path in ledger_dir.iterdir()) == ["cpu-0.ledger", "cpu-1.ledger", "notes.txt"]


def test_report_is_the_same_in_all_members(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """The engine answers in every member's slot."""
    subscription = subscribe()
    subscription.acknowledge(RetentionPolicy(ToyCache(idle=48, active=5), 16000).report())
    with LedgerDirectory(str(ledger_dir), writable=False) as directory:
        reports = [ledger.handle.live_slots()[0][1].report for ledger in directory.open_all()]
    assert len(reports) == 2
    assert reports[0] == reports[1]
    assert (reports[0].idle_tokens, reports[0].active_tokens) == (48, 5)


def test_refresh_is_throttled_but_up_to_date_when_idle(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """Figures of a busy engine are written now and then, and at once when it is about to sleep."""
    subscription = subscribe()
    cache = ToyCache(idle=16)
    policy = RetentionPolicy(cache, 16000)
    subscription.refresh(policy.report)
    cache.idle = 32
    subscription.refresh(policy.report)
    assert get_instances(ledger_dir)[0].replicas[0].idle_tokens == 16
    subscription.refresh(policy.report, idle=True)
    assert get_instances(ledger_dir)[0].replicas[0].idle_tokens == 32


def test_long_reason_is_cut_at_a_character(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """A reason longer than its field arrives shortened, not broken."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(), 16000)
    policy.reject(Update(1, 5), Outcome.UNSUPPORTED_ENGINE, "ä" * 500)
    subscription.acknowledge(policy.report())
    assert get_instances(ledger_dir)[0].replicas[0].reason == "ä" * 63


def test_engine_without_native_library_serves_and_says_so(
    ledger_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing library is a warning in the engine, not its end."""
    monkeypatch.setattr(_native, "_library", None)
    monkeypatch.setattr(_native, "LIBRARY_PATH", "/nonexistent/libkvledger.so")
    subscription = Subscription(identity(), ["cpu-0"], str(ledger_dir))
    subscription.start()
    assert subscription.poll() is None
    assert "native library /nonexistent/libkvledger.so does not load" in caplog.text
    subscription.close()
