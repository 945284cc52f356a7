"""The guard around returned memory: right rounding passes, a mistake in it kills the process."""

from __future__ import annotations

import signal
import subprocess
import sys

ACTOR = """
import random, sys
from kvcached.memory.regions import PoolShape
from kvcached.memory.madvise import pages_inside
from kvcached.rig import guarded_memory
from kvcached.rig.guarded_memory import GuardedMemory, GuardedTransport
from kvcached.rig.kv_rows import KvRows

def inward(region, run, page_bytes):
    return next(iter(pages_inside(region, [run], page_bytes)), (region.address, region.address))

def stress(token_bytes):
    rows = KvRows(200, 16, token_bytes)
    region = rows.region()
    memory = GuardedMemory(PoolShape(200, region.row_bytes), GuardedTransport(region, 1))
    dice = random.Random(5)
    free, used = set(range(200)), set()
    for _ in range(500):
        taken = dice.sample(sorted(free), min(len(free), dice.randrange(20)))
        memory.take(taken)
        free -= set(taken)
        used |= set(taken)
        rows.write(taken, [row + 1 for row in taken])
        freed = dice.sample(sorted(used), dice.randrange(len(used) + 1))
        rows.verify(freed, [row + 1 for row in freed])
        used -= set(freed)
        free |= set(freed)
        memory.offer(freed)
        while memory.busy:
            memory.advance()

if sys.argv[1] == "inward":
    guarded_memory.covering_pages = inward
for token_bytes in map(int, sys.argv[2:]):
    stress(token_bytes)
print("survived")
"""


def run(rounding: str, *token_bytes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ACTOR, rounding, *token_bytes]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_rows_in_use_are_always_accessible() -> None:
    """Whatever is returned and taken, no row in use lies on a page that is out of bounds."""
    result = run("outward", "8", "100", "256", "400")
    assert (result.returncode, result.stdout.strip()) == (0, "survived"), result.stderr


def test_rounding_inward_when_a_row_is_taken_again_kills_the_process() -> None:
    """The guard sees the seeded mistake: rows of 1600 bytes share pages."""
    assert run("inward", "100").returncode == -signal.SIGSEGV
