"""Hazards of a process that forks while the threads of a subscription work."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FORKS_BESIDE_ITS_WATCHER = """
import os, signal, sys, threading, time
from kvcached.control import get_instances, set_prefix_cache_retention_limit
from kvcached.ledger.subscription import Subscription
from kvcached.values import Identity, Outcome, Report, Update

directory = sys.argv[1]
subscription = Subscription(Identity("a", "toy", "1", 0, 2, 1, 16000, 16), ["cpu-0", "cpu-1"], directory)
subscription.start()
report = Report(Update(0, 16000), 0, Outcome.STARTUP, "", 77, 0, 0, 0, 0)
stop = threading.Event()

def publish():
    limit = 0
    while not stop.is_set():
        limit += 1
        set_prefix_cache_retention_limit(limit, instance_name="a", ledger_dir=directory)

threads = [threading.Thread(target=publish) for _ in range(2)]
for thread in threads:
    thread.start()
for number in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        subscription.acknowledge(report)
        subscription.wait(time.monotonic())
        assert len(get_instances(directory)) == 1  # the parent's
        subscription.close()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, (number, status)
stop.set()
for thread in threads:
    thread.join()
assert get_instances(directory)[0].replicas[0].idle_tokens == 0
subscription.close()
print("all came back")
"""


def test_children_of_a_busy_process_never_hang(tmp_path: Path) -> None:
    """Forked beside a working watcher and two publishing threads, children look, report nothing, and end."""
    directory = tmp_path / "ledgers"
    directory.mkdir(mode=0o700)
    command = [sys.executable, "-W", "ignore", "-c", FORKS_BESIDE_ITS_WATCHER, str(directory), "100"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (0, "all came back\n"), result.stderr
