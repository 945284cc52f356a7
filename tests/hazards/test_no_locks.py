"""Hazards of a sandbox without open-file-description locks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NO_LOCKS = Path(__file__).parents[1] / "support" / "no_locks.py"

REGISTERS = """
import logging, sys
from kvcached.ledger.subscription import Subscription
from kvcached.values import Identity
logging.basicConfig(stream=sys.stdout)
subscription = Subscription(Identity("a", "toy", "1", 0, 1, 1, 16000, 16), ["cpu-0"], sys.argv[1])
subscription.start()
print("registered", subscription.registered)
subscription.close()
"""


def test_engine_without_file_locks_serves_and_names_the_cause(tmp_path: Path) -> None:
    """An engine in such a sandbox goes on without control, and says that file locks do not work and what it needs."""
    directory = tmp_path / "ledgers"
    directory.mkdir(mode=0o700)
    command = [sys.executable, str(NO_LOCKS), sys.executable, "-c", REGISTERS, str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "registered False" in result.stdout
    assert f"file locks do not work on {directory}: Invalid argument" in result.stdout
    assert "fcntl(F_OFD_SETLK)" in result.stdout
