"""Hazards of a ledger that is taken away from under a live engine."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

OUTLIVES_ITS_LEDGER = """
import os, sys, time
from dataclasses import replace
from kvcached.ledger.subscription import Subscription
from kvcached.values import Identity, Outcome, Report, Update

directory = sys.argv[1]
subscription = Subscription(Identity("a", "toy", "1", 0, 2, 1, 16000, 16), ["cpu-0", "cpu-1"], directory)
subscription.start()
report = Report(Update(0, 16000), 0, Outcome.STARTUP, "", 0, 0, 0, 0, 0)
subscription.acknowledge(report)
os.unlink(directory + "/cpu-1.ledger")
with open(directory + "/cpu-1.ledger", "w") as file:
    file.write("no ledger, and none can be made here")
deadline = time.monotonic() + 20
while subscription.registered:
    assert time.monotonic() < deadline, "the loss was not noticed"
    time.sleep(0.01)
for step in range(50):
    assert subscription.poll() is None
    subscription.acknowledge(replace(report, idle_tokens=step))
    time.sleep(0.002)
subscription.close()
print("served on")
"""


def test_an_engine_whose_ledger_cannot_be_replaced_serves_on(tmp_path: Path) -> None:
    """The hot look does not lead to unmapped memory while an engine has lost its ledger and got no other one."""
    directory = tmp_path / "ledgers"
    directory.mkdir(mode=0o700)
    result = subprocess.run(
        [sys.executable, "-c", OUTLIVES_ITS_LEDGER, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "served on\n"), result.stderr
