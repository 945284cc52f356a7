"""Waiting for a publication: what is away for a moment is waited for, what is gone for good is told as that."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.commands import AS_USER, PATIENCE_S, run, wait_for

from kvcached.ledger import waiting
from kvcached.ledger.publication import publish
from kvcached.ledger.waiting import ABSENCE_S, wait_until_applied

if TYPE_CHECKING:
    from support.commands import Control, Toys

    from kvcached.ledger.publication import PublicationResult

SOON_S = 0.4
"""How long what is gone for good is waited for here, where nothing could bring it back."""
NO_LOCKS = Path(AS_USER).with_name("no_locks.py")


class Waiting(threading.Thread):
    """A wait for a publication of 5,000 tokens to "chat" that goes on while the test does something else."""

    def __init__(self, control: Control) -> None:
        super().__init__()
        self._control = control
        self.published = publish(5000, "chat", str(control.directory))
        self.result: PublicationResult | None = None
        assert self.published.accepted

    def run(self) -> None:
        """Wait."""
        self.result = wait_until_applied(self.published, str(self._control.directory), PATIENCE_S)

    def end(self) -> PublicationResult:
        """Return what became of it."""
        self.join()
        assert self.result is not None
        return self.result


def test_replica_that_lost_its_ledger_is_waited_for(control: Control, toys: Toys) -> None:
    """While the first replica is slow, another one whose ledger is removed registers again, and did not end."""
    slow = toys.start("chat", gpus="GPU-0")
    toys.start("chat", gpus="GPU-1", first_replica=1)
    slow.send_signal(signal.SIGSTOP)
    wait = Waiting(control)
    wait.start()
    (control.directory / "GPU-1.ledger").unlink()
    wait_for(lambda: len(control.json("status")["instances"][0]["replicas"]) == 2, "second registration")
    time.sleep(ABSENCE_S + 1)
    slow.send_signal(signal.SIGCONT)
    result = wait.end()
    assert (result.applied, result.engine_ended, result.warnings) == (True, False, ())


def test_restart_drops_the_publication(control: Control, toys: Toys) -> None:
    """An engine that was started again under the same name does not have the publication, and that ends the wait."""
    first = toys.start("chat", trouble="deaf")
    published = publish(5000, "chat", str(control.directory))
    first.kill()
    first.wait()
    toys.start("chat")
    result = wait_until_applied(published, str(control.directory), PATIENCE_S)
    assert (result.applied, result.engine_ended) == (False, True)
    assert result.warnings == ("replica 0 restarted in the meantime, which drops the publication; publish again",)
    assert result.waited_s is not None
    assert result.waited_s < PATIENCE_S


def test_end_of_the_engine_ends_the_wait(control: Control, toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that ends and does not come back is told as ended, long before the time is over."""
    monkeypatch.setattr(waiting, "ABSENCE_S", SOON_S)
    engine = toys.start("chat", trouble="deaf")
    published = publish(5000, "chat", str(control.directory))
    engine.kill()
    engine.wait()
    result = wait_until_applied(published, str(control.directory), PATIENCE_S)
    assert (result.applied, result.engine_ended) == (False, True)
    assert result.warnings == ("replica 0 ended during the wait, which drops the publication",)


def test_directory_that_is_away_for_a_moment_is_waited_for(control: Control, toys: Toys) -> None:
    """A directory that is gone and comes back, as a file may, ends no wait."""
    engine = toys.start("chat")
    engine.send_signal(signal.SIGSTOP)  # it would make the directory again
    wait = Waiting(control)
    wait.start()
    away = control.directory.with_name("away")
    control.directory.rename(away)
    time.sleep(ABSENCE_S / 3)
    away.rename(control.directory)
    engine.send_signal(signal.SIGCONT)
    result = wait.end()
    assert (result.applied, result.engine_ended, result.warnings) == (True, False, ())


def test_directory_that_stays_away_ends_the_wait(control: Control, toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that does not come back is named as the reason."""
    monkeypatch.setattr(waiting, "ABSENCE_S", SOON_S)
    engine = toys.start("chat")
    engine.send_signal(signal.SIGSTOP)
    wait = Waiting(control)
    wait.start()
    control.directory.rename(control.directory.with_name("away"))
    result = wait.end()
    assert (result.applied, result.engine_ended) == (False, True)
    assert f"ledger directory {control.directory} cannot be opened" in result.warnings[0]


def test_newer_publication_of_the_same_limit_is_as_good(control: Control, toys: Toys) -> None:
    """A wait ends well if the same limit was published again, and as superseded if another one was."""
    toys.start("chat")
    first = publish(5000, "chat", str(control.directory))
    again = wait_until_applied(publish(5000, "chat", str(control.directory)), str(control.directory), PATIENCE_S)
    assert again.applied
    assert wait_until_applied(first, str(control.directory), PATIENCE_S).applied
    other = wait_until_applied(publish(6000, "chat", str(control.directory)), str(control.directory), PATIENCE_S)
    assert other.applied
    late = wait_until_applied(first, str(control.directory), PATIENCE_S)
    assert (late.status, late.applied) == ("superseded", False)


WAIT_IN_A_SANDBOX = f"""
import json, sys
from kvcached.ledger import waiting
from kvcached.ledger.publication import MemberResult, PublicationResult
published = PublicationResult("accepted", "chat", 5000, 1, (MemberResult("cpu-0", 0, "published", 1, 5000, None),))
waiting.ABSENCE_S = {SOON_S}
result = waiting.wait_until_applied(published, sys.argv[1], {SOON_S + 1})
print(json.dumps([result.applied, result.engine_ended, *result.warnings]))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is written for x86-64")
def test_engine_that_cannot_be_looked_at_did_not_end(control: Control, toys: Toys) -> None:
    """Where the system does not say who is alive, the wait goes on to its end and says why nothing was seen."""
    toys.start("chat", trouble="deaf")
    publish(5000, "chat", str(control.directory))
    command = [sys.executable, str(NO_LOCKS), sys.executable, "-c", WAIT_IN_A_SANDBOX, str(control.directory)]
    applied, ended, warning = json.loads(run(command).stdout)
    assert (applied, ended) == (False, False)
    assert "cannot tell which engines are alive" in warning


def test_wait_beside_a_busy_engine_looks_at_its_deadline(control: Control, toys: Toys) -> None:
    """Bells that ring all the time do not stretch a wait."""
    toys.start("chat", trouble="deaf")
    published = publish(5000, "chat", str(control.directory))
    ring = (
        "import sys; from kvcached.ledger.directory import LedgerDirectory\n"
        "with LedgerDirectory(sys.argv[1], writable=True) as directory:\n"
        "    (ledger,) = directory.open_all()\n"
        "    print(flush=True)\n"
        "    while True: ledger.handle.ring(1)"
    )
    command = [sys.executable, "-c", ring, str(control.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as ringer:
        assert ringer.stdout is not None
        ringer.stdout.readline()
        result = wait_until_applied(published, str(control.directory), 0.5)
        ringer.kill()
    assert (result.applied, result.engine_ended) == (False, False)
    assert result.warnings == ("replica 0 has not applied it yet",)
