"""A publisher or an engine that is killed or stopped at any call into the library hinders nobody, and all heals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.toys import ToyCache, identity, poll_now

from crash.dying import GPUS
from kvcached.ledger.instances import get_instances
from kvcached.ledger.publication import publish
from kvcached.ledger.registration import Beginning, register
from kvcached.ledger.subscription import Subscription
from kvcached.policy import RetentionPolicy
from kvcached.values import Bound, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TESTS = Path(__file__).parents[1]

PROMISED_S = 0.1
PATIENCE_S = 10.0
"""What others may take here, where more processes run than there are processors; what is promised is PROMISED_S."""


class Engine:
    """An engine in this process, stepped by a thread of its own."""

    def __init__(self, ledger_dir: Path) -> None:
        self.policy = RetentionPolicy(ToyCache(), 16000)
        self.subscription = Subscription(identity(), GPUS, str(ledger_dir))
        self.subscription.start()
        self.subscription.acknowledge(self.policy.report())
        self.applied: list[Update] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.subscription.wait(time.monotonic() + 0.05):
                update = poll_now(self.subscription)
                if update is not None:
                    self.policy.update(update)
                    self.applied.append(update)
                    self.subscription.acknowledge(self.policy.report())

    def close(self) -> None:
        """End the thread and the registration."""
        self._stop.set()
        self._thread.join()
        self.subscription.close()


@pytest.fixture
def engine(ledger_dir: Path) -> Iterator[Engine]:
    """Run a live engine of three members."""
    engine = Engine(ledger_dir)
    yield engine
    engine.close()


class Clock:
    """Times what others do after a crash."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def time(self, action: Callable[[], object]) -> None:
        """Run an action, and fail if it takes too long."""
        started = time.monotonic()
        action()
        took = time.monotonic() - started
        self.longest_s = max(self.longest_s, took)
        assert took < PATIENCE_S


def crash_everywhere(operation: str, ledger_dir: Path, number: int, check: Callable[[str], None]) -> int:
    """Let an operation crash at each of its calls, and ``check`` after each; how many there were."""
    command = [sys.executable, "-m", "crash.dying", operation, str(ledger_dir), str(int(number))]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdin is not None
    points = 0
    try:
        for line in process.stdout:
            if line == "finished\n":
                assert process.wait(PATIENCE_S) == 0
                return points
            points += 1
            check(line.split()[1])
            process.stdin.write("on\n")
            process.stdin.flush()
    finally:
        process.kill()
        process.communicate()
    pytest.fail("the dying process ended too early")


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_crashed_publication_is_old_new_or_split_and_heals(engine: Engine, ledger_dir: Path, number: int) -> None:
    """Whatever call a publisher died at, the next publication is accepted and applied, and reading goes on."""
    clock = Clock()
    states = {"old": 0, "new": 0, "split": 0}

    def check(_call: str) -> None:
        before = engine.applied[-1] if engine.applied else Update(0, 16000)
        (status,) = get_instances(ledger_dir)
        (replica,) = status.replicas
        pairs = {(member.revision, member.limit_tokens) for member in replica.members}
        newest = max(pairs)
        assert newest[1] in (7, before.limit_tokens)
        states["split" if replica.split else "new" if newest[1] == 7 else "old"] += 1
        clock.time(lambda: get_instances(ledger_dir))
        limit = 1000 + len(engine.applied)
        results = []
        clock.time(lambda: results.append(publish(limit, "engine", str(ledger_dir))))
        assert results[0].accepted
        assert results[0].revision > newest[0] - (1 if replica.split else 0)
        until(lambda: engine.policy.limit_tokens == limit)

    points = crash_everywhere("publish", ledger_dir, number, check)
    revisions = [update.revision for update in engine.applied]
    assert revisions == sorted(set(revisions))
    assert min(states.values()) > 0, states
    print(f"{points} calls, states {states}, longest operation of others {clock.longest_s * 1e3:.1f} ms")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_crashed_publication_of_a_cap_touches_no_limit(engine: Engine, ledger_dir: Path, number: int) -> None:
    """Whatever call a publisher of a cap died at, the limit is as it was, and both are published again."""
    caps = []

    def check(_call: str) -> None:
        limit = 1000 + len(engine.applied)
        (replica,) = get_instances(ledger_dir)[0].replicas
        assert len({(member.revision, member.limit_tokens) for member in replica.members}) == 1
        assert {member.cap.limit_tokens for member in replica.members} <= {7, *caps[-1:], -1}
        caps.append(5000 + len(caps))
        assert publish(caps[-1], "engine", str(ledger_dir), bound=Bound.CAP).accepted
        assert publish(limit, "engine", str(ledger_dir)).accepted
        until(lambda: engine.policy.limit_tokens == limit)

    points = crash_everywhere("publish a cap", ledger_dir, number, check)
    assert points == len(caps) > len(GPUS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_crashed_registration_hinders_neither_engines_nor_publishers(
    engine: Engine, ledger_dir: Path, number: int
) -> None:
    """Whatever call an engine died at while it registered, others register and publish, and its name is free again."""
    clock = Clock()

    def register_other(name: str) -> None:
        # Without the thread of a subscription, which may take a second to notice that it is closed at once.
        beginning = Beginning((Update(0, 16000),))
        register(identity(name), GPUS, str(ledger_dir), beginning).close()

    def check(_call: str) -> None:
        assert {instance.name for instance in get_instances(ledger_dir)} - {"newcomer"} == {"engine"}
        clock.time(lambda: register_other("other"))
        limit = 1000 + len(engine.applied)
        results = []
        clock.time(lambda: results.append(publish(limit, "engine", str(ledger_dir))))
        assert results[0].accepted
        until(lambda: engine.policy.limit_tokens == limit)
        if number == signal.SIGKILL:
            clock.time(lambda: register_other("newcomer"))

    points = crash_everywhere("register", ledger_dir, number, check)
    assert points > 20
    print(f"{points} calls, longest operation of others {clock.longest_s * 1e3:.1f} ms")
