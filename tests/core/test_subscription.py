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
from support.toys import ToyCache, identity, poll_now, settle

from kvcached.ledger import binding
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.instances import get_instances
from kvcached.ledger.publication import publish
from kvcached.ledger.registration import InstanceNameTakenError, Registration
from kvcached.ledger.subscription import Subscription
from kvcached.ledger.watcher import HOUSEKEEPING_S
from kvcached.policy import RetentionPolicy
from kvcached.values import Outcome, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Holder = subprocess.Popen[str]

REGISTERS_AGAIN_S = 8.0  # 2 are promised, and kept by a machine that has a core to spare
PATIENCE_S = 20.0  # for a loaded machine; what is promised is asserted with its own figure

HOLD_A_SLOT = """
import sys, time
from kvcached.ledger.subscription import Subscription
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
    assert poll_now(subscription) == subscription.poll() == Update(1, 7)
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
        assert poll_now(subscription) == Update(policy.settled_revision + 1, limit)
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
    """A publication met half-way is read again, and is applied once it is stored in all members."""
    subscription = subscribe()
    raw_raise(ledger_dir, "cpu-1", Update(1, 7))  # the last member first, as no honest publisher would
    assert poll_now(subscription) is None
    raw_raise(ledger_dir, "cpu-0", Update(1, 7))
    assert poll_now(subscription) == Update(1, 7)


def test_equal_revision_with_another_limit_is_no_match(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """Members that agree on the revision but not on the limit are not taken; the next publication repairs them."""
    subscription = subscribe()
    raw_raise(ledger_dir, "cpu-0", Update(1, 7))
    raw_raise(ledger_dir, "cpu-1", Update(1, 8))
    assert poll_now(subscription) is None
    assert get_instances(ledger_dir)[0].replicas[0].split
    assert publish(9, "engine", str(ledger_dir)).accepted
    assert poll_now(subscription) == Update(2, 9)


def test_senseless_word_is_rejected_and_the_next_is_taken(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """A limit below -1 is never offered, is acknowledged as invalid, and does not block the next publication."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(), 16000)
    subscription.acknowledge(policy.report())
    for gpu in ("cpu-0", "cpu-1"):
        raw_raise(ledger_dir, gpu, Update(1, -7))
    assert poll_now(subscription) is None
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
    assert [poll_now(replica) for replica in replicas] == [Update(1, 3)] * 2


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


DAMAGES = {
    "unlink": 64,
    "replace": 64,
    "remove directory": 64,
    "hole": 64,
    # The lost word may have carried the pair that the other member carries: then its publication was accepted.
    "truncate": 32,
    "cut and regrown": 32,
    "zeroed": 32,
    "truncate and unlink": 32,
}


def spoil(path: Path, damage: str) -> None:
    """Do to a ledger what peers, backups and operators do to it."""
    if damage == "unlink":
        path.unlink()
    elif damage == "replace":
        shutil.copy(path, path.with_suffix(".copy"))
        path.with_suffix(".copy").rename(path)
    elif damage == "remove directory":
        shutil.rmtree(path.parent)
    elif damage == "zeroed":
        with path.open("r+b") as file:
            file.write(b"\0" * path.stat().st_size)
    elif damage == "hole":
        subprocess.run(["fallocate", "--punch-hole", "--offset", "0", "--length", "4096", str(path)], check=True)
    else:
        size = path.stat().st_size
        os.truncate(path, 0)
        if damage == "cut and regrown":
            os.truncate(path, size)
        if damage == "truncate and unlink":
            path.unlink()


@pytest.mark.parametrize("damage", DAMAGES)
def test_lost_ledger_is_registered_again(damage: str, subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """A removed, replaced or damaged ledger leads to a new registration that keeps limit and report."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(idle=160), 16000)
    publish(64, "engine", str(ledger_dir))
    settle(subscription, policy)
    started = time.monotonic()
    spoil(ledger_dir / "cpu-1.ledger", damage)
    assert not publish(32, "engine", str(ledger_dir)).accepted
    until(lambda: ledger_dir.exists() and [i.replicas[0].split for i in get_instances(ledger_dir)] == [False])
    assert time.monotonic() - started < REGISTERS_AGAIN_S
    # The slots are there a moment before the subscription has them.
    until(lambda: settle(subscription, policy).applied.limit_tokens == DAMAGES[damage])
    # A slot is alive a moment before its first report is written.
    until(lambda: get_instances(ledger_dir)[0].replicas[0].applied == policy.report().applied)
    assert get_instances(ledger_dir)[0].replicas[0].outcome is Outcome.APPLIED
    assert poll_now(subscription) is None
    revision = publish(16, "engine", str(ledger_dir)).revision
    assert revision == policy.settled_revision + 1
    assert settle(subscription, policy).idle_tokens == 16


def test_damaged_ledger_is_set_aside_by_its_engine(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """What is left of a ledger that was cut stays in the directory under another name, for whoever asks how."""
    subscribe()
    path = ledger_dir / "cpu-1.ledger"
    os.truncate(path, 100)
    until(lambda: names(ledger_dir) == ["engine"] and path.exists() and path.stat().st_size > 100)
    assert (ledger_dir / "cpu-1.ledger.damaged").stat().st_size == 100


def test_ledger_of_another_release_is_left_alone(
    subscribe: Callable[..., Subscription], ledger_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A ledger over which another release wrote its own is neither set aside nor written to."""
    subscription = subscribe()
    path = ledger_dir / "cpu-1.ledger"
    with path.open("r+b") as file:
        file.seek(12)
        file.write((99).to_bytes(4, sys.byteorder))
    content = path.read_bytes()
    until(lambda: "has ledger version 99" in caplog.text)
    assert not subscription.registered
    assert path.read_bytes() == content


def test_another_ledger_copied_over_a_live_one_changes_no_limit(
    subscribe: Callable[..., Subscription], tmp_path: Path, ledger_dir: Path
) -> None:
    """An engine applies nothing of a ledger that was copied over its own, and is under control again within seconds."""
    other_dir = tmp_path / "other"
    other_dir.mkdir(mode=0o700)
    other = Subscription(identity("beta"), ["cpu-0", "cpu-1"], str(other_dir))
    other.start()
    publish(0, "beta", str(other_dir))
    other.close()
    subscription = subscribe("alpha")
    started = time.monotonic()
    for gpu in ("cpu-0", "cpu-1"):
        (ledger_dir / f"{gpu}.ledger").write_bytes((other_dir / f"{gpu}.ledger").read_bytes())
    assert poll_now(subscription) is None
    assert names(ledger_dir) == []  # nobody takes alpha's lock for a sign that beta lives
    assert not publish(1, "beta", str(ledger_dir)).accepted
    until(lambda: names(ledger_dir) == ["alpha"])
    assert time.monotonic() - started < REGISTERS_AGAIN_S
    assert publish(7, "alpha", str(ledger_dir)).accepted
    assert poll_now(subscription) == Update(1, 7)


def _has_settled_down(ledger_dir: Path) -> bool:
    """Return whether one engine holds revision 3 in both files, and registers no other time within two looks."""
    before = get_instances(ledger_dir)
    time.sleep(2 * HOUSEKEEPING_S)
    after = get_instances(ledger_dir)
    shown = [(one.replicas[0].split, one.replicas[0].members[0].revision) for one in after]
    return shown == [(False, 3)] and [one.incarnation for one in before] == [one.incarnation for one in after]


def test_old_copy_of_a_ledger_put_back_loses_no_later_publication(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """After a restore in place, no revision is used again, and what is accepted afterwards is applied."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(), 16000)
    paths = [ledger_dir / f"{gpu}.ledger" for gpu in ("cpu-0", "cpu-1")]
    copies = [path.read_bytes() for path in paths]
    for limit in (5, 6, 7):
        assert publish(limit, "engine", str(ledger_dir)).accepted
        settle(subscription, policy)
    for path, copy in zip(paths, copies, strict=True):
        with path.open("r+b") as file:
            file.write(copy)
    # The watcher may have met the first file before the second was put back, and registers twice then.
    until(lambda: _has_settled_down(ledger_dir))
    result = publish(8, "engine", str(ledger_dir))
    assert (result.accepted, result.revision) == (True, 4)
    until(lambda: settle(subscription, policy).applied.limit_tokens == 8)


def test_closed_descriptor_of_a_ledger_is_noticed(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """An engine whose descriptors somebody closed registers again, and writes into no file that got their numbers."""
    subscription = subscribe()
    cache = ToyCache(idle=16)
    policy = RetentionPolicy(cache, 16000)
    subscription.acknowledge(policy.report())
    inodes = {path.stat().st_ino for path in ledger_dir.iterdir()}
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    closed = [fd for fd in numbers if os.path.exists(f"/proc/self/fd/{fd}") and os.fstat(fd).st_ino in inodes]
    for fd in closed:
        os.close(fd)
    innocent = [os.memfd_create("innocent") for _ in closed]
    try:
        for idle in range(50):
            cache.idle = idle
            subscription.acknowledge(policy.report())
            time.sleep(0.02)
        until(lambda: names(ledger_dir) == ["engine"])
        assert publish(7, "engine", str(ledger_dir)).accepted
        assert poll_now(subscription) == Update(1, 7)
        assert [os.fstat(fd).st_size for fd in innocent] == [0] * len(innocent)
    finally:
        for fd in innocent:
            os.close(fd)


def test_half_a_publication_before_a_loss_does_not_use_its_revision_again(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """After a split and a lost ledger the limit in force goes on, under a revision above both halves."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(), 16000)
    publish(1005, "engine", str(ledger_dir))
    settle(subscription, policy)
    raw_raise(ledger_dir, "cpu-0", Update(2, 111))
    (ledger_dir / "cpu-1.ledger").unlink()
    until(lambda: [i.replicas[0].split for i in get_instances(ledger_dir)] == [False])
    assert publish(222, "engine", str(ledger_dir), if_revision=2).status == "superseded"
    assert poll_now(subscription) == Update(3, 1005)
    settle(subscription, policy)
    assert publish(222, "engine", str(ledger_dir), if_revision=3).revision == 4


def test_publication_accepted_before_a_cut_is_not_lost(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """If one ledger is cut after a publication was accepted, the pair that the others carry is offered."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(), 16000)
    publish(5, "engine", str(ledger_dir))
    settle(subscription, policy)
    with subscription._settlement._lock:  # nobody looks before the cut
        assert publish(6, "engine", str(ledger_dir)).accepted
        os.truncate(ledger_dir / "cpu-1.ledger", 0)
    until(lambda: [i.replicas[0].split for i in get_instances(ledger_dir)] == [False])
    assert poll_now(subscription) == Update(2, 6)


def test_close_ends_a_wait_in_another_thread(subscribe: Callable[..., Subscription]) -> None:
    """A wait with a distant deadline returns False once the subscription is closed, and takes no processor time."""
    subscription = subscribe()
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(subscription.wait(time.monotonic() + 600)))
    waiter.start()
    time.sleep(0.1)
    subscription.close()
    waiter.join(PATIENCE_S)
    assert answers == [False]


def test_nobody_sleeps_on_a_bell_that_was_read_after_close_may_have_rung_it(
    subscribe: Callable[..., Subscription], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the watcher nor a wait does: that ring is counted already, and no other would end their sleep."""
    subscription = subscribe()
    read_after: set[int] = set()
    slept: set[int] = set()
    read = Registration.bell

    def read_late(registration: Registration) -> int:
        subscription._watcher.stopping.set()
        read_after.add(threading.get_ident())
        return read(registration)

    def sleep(_registration: Registration, _seen: int, _deadline: float) -> None:
        if threading.get_ident() in read_after:
            slept.add(threading.get_ident())

    monkeypatch.setattr(Registration, "sleep", sleep)
    monkeypatch.setattr(Registration, "bell", read_late)
    assert not subscription.wait(time.monotonic() + 60)
    subscription.close()
    assert threading.get_ident() in read_after
    assert not slept


def test_wait_on_a_cut_ledger_sleeps_and_keeps_its_deadline(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """While a cut ledger cannot be replaced, a wait lasts until its deadline without spinning."""
    subscription = subscribe()
    for gpu in ("cpu-0", "cpu-1"):
        os.truncate(ledger_dir / f"{gpu}.ledger", 0)
        (ledger_dir / f"{gpu}.ledger").rename(ledger_dir / gpu)
        (ledger_dir / f"{gpu}.ledger").mkdir()
    deadline, used = time.monotonic() + 1.0, time.thread_time()
    assert not subscription.wait(deadline)
    assert time.monotonic() >= deadline
    assert time.thread_time() - used < 0.5


def test_truncated_ledger_does_not_end_the_process(
    subscribe: Callable[..., Subscription], ledger_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file truncated to nothing raises no SIGBUS: polls and reports go on, and the loss is reported."""
    subscription = subscribe()
    policy = RetentionPolicy(ToyCache(), 16000)
    os.truncate(ledger_dir / "cpu-1.ledger", 0)
    for _ in range(1000):
        subscription.poll()
        subscription.acknowledge(policy.report())
        policy.update(Update(policy.settled_revision + 1, 5))
    until(lambda: "cpu-1 was truncated or overwritten" in caplog.text)
    until(lambda: subscription.registered)


def test_publication_confirmed_before_a_loss_is_not_forgotten(
    subscribe: Callable[..., Subscription], ledger_dir: Path
) -> None:
    """What was accepted just before the files vanished is offered after the new registration."""
    subscription = subscribe()
    assert publish(5, "engine", str(ledger_dir)).accepted
    shutil.rmtree(ledger_dir)
    until(lambda: ledger_dir.exists() and names(ledger_dir) == ["engine"])
    until(lambda: poll_now(subscription) == Update(1, 5))
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


def test_leftovers_of_killed_page_writers_are_swept(subscribe: Callable[..., Subscription], ledger_dir: Path) -> None:
    """A half-made advice page of a killed engine is removed by the next registration, and nothing else is."""
    leftover = ledger_dir / ".cpu-0.3.advice.0123456789abcdef.new"
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
    monkeypatch.setattr(binding, "_library", None)
    monkeypatch.setattr(binding, "LIBRARY_PATH", "/nonexistent/libkvledger.so")
    subscription = Subscription(identity(), ["cpu-0"], str(ledger_dir))
    subscription.start()
    assert subscription.poll() is None
    assert "native library /nonexistent/libkvledger.so does not load" in caplog.text
    subscription.close()
