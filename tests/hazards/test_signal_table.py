"""Hazards of a library that lives in somebody else's server: its signal handlers and its children."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LIVES_THROUGH_IT_ALL = """
import ctypes, faulthandler, json, os, signal, sys, time
from kvcached.control import set_prefix_cache_retention_limit
from kvcached.ledger.subscription import Subscription
from kvcached.values import Identity, Outcome, Report, Update

libc = ctypes.CDLL(None)

def table():
    rows = {}
    for number in range(1, 65):
        action = ctypes.create_string_buffer(152)
        if libc.sigaction(number, None, action) == 0:
            # glibc fills the mask beyond its first 64 bits with whatever was on its stack
            rows[number] = (action.raw[:16] + action.raw[136:144]).hex()
    return rows

directory = sys.argv[1]
children = []
signal.signal(signal.SIGCHLD, lambda *_: children.append(1))
faulthandler.enable()
before = table()
different = []

def look(when):
    different.extend(f"{when}: signal {number}" for number, row in table().items() if row != before[number])

subscription = Subscription(Identity("a", "toy", "1", 0, 2, 1, 16000, 16), ["cpu-0", "cpu-1"], directory)
subscription.start()
look("registered")
assert set_prefix_cache_retention_limit(5, instance_name="a", ledger_dir=directory).accepted
look("published")
subscription.acknowledge(Report(Update(0, 16000), 0, Outcome.STARTUP, "", 0, 0, 0, 0, 0))
look("acknowledged")
os.truncate(directory + "/cpu-1.ledger", 0)
set_prefix_cache_retention_limit(6, instance_name="a", ledger_dir=directory)
look("cut")
deadline = time.monotonic() + 20
while not set_prefix_cache_retention_limit(7, instance_name="a", ledger_dir=directory).accepted:
    assert time.monotonic() < deadline, "control did not come back"
    time.sleep(0.05)
look("registered again")
subscription.close()
look("closed")
print(json.dumps({"different": different, "children": len(children)}))
"""


def test_no_signal_handler_changes_from_registration_to_close(tmp_path: Path) -> None:
    """Registration, publication, loss and close leave all 64 entries of the signal table alone, and send no SIGCHLD."""
    directory = tmp_path / "ledgers"
    directory.mkdir(mode=0o700)
    command = [sys.executable, "-c", LIVES_THROUGH_IT_ALL, str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"different": [], "children": 0}


DISABLES_FAULTHANDLER = """
import ctypes, faulthandler, mmap, os, resource, sys, tempfile, time
from kvcached.ledger.subscription import Subscription
from kvcached.values import Identity
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
faulthandler.enable()
subscription = Subscription(Identity("a", "toy", "1", 0, 1, 1, 16000, 16), ["cpu-0"], sys.argv[1])
subscription.start()
time.sleep(1.5)
faulthandler.disable()
with tempfile.TemporaryFile() as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, 1)
"""


def test_bus_error_of_the_process_itself_ends_it_as_without_us(tmp_path: Path) -> None:
    """An engine that faults outside of ledgers after faulthandler.disable() dies of SIGBUS and does not hang."""
    directory = tmp_path / "ledgers"
    directory.mkdir(mode=0o700)
    command = [sys.executable, "-c", DISABLES_FAULTHANDLER, str(directory)]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert result.returncode == -7
