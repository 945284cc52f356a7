"""The balance storm: a supervisor's rounds are killed at random times, and no look shows more than the budget.

Two toy engines apply what is published after some milliseconds. A victim moves the budget from one to the other and
back, without rest; it is killed after a random time and another one goes on, which knows nothing of what it was at. A
reader of its own knows only the budget: it adds up what each engine is told, has in force, or holds.

With ``--fault`` the rounds are broken in one way, and the reader has to see it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from children import fork

from kvcached.balance import publishing_round
from kvcached.balance.budget import Budget
from kvcached.balance.budget_lock import BudgetLock
from kvcached.balance.decision import Decision, Verdict
from kvcached.balance.engine_look import ReplicaLook
from kvcached.balance.looking import look_at_engines
from kvcached.balance.observations import Observations
from kvcached.balance.rules import Rules
from kvcached.balance.standing import Party, Standing
from kvcached.balance.terms import Terms
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.snapshot import look_again, look_at
from kvcached.values import Bound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcached.balance.engine_look import InstanceLook
    from kvcached.ledger.publication import PublicationResult
    from kvcached.ledger.replicas import Replica

BUDGET = 40_000
SMALL, LARGE = 8_000, 32_000
ENGINE = Path(__file__).parents[1] / "support" / "toy_engine.py"
LONGEST_LIFE_ROUNDS = 4
"""How many rounds a victim lives at most, by the time that they take on this machine."""

FAULTS = ("none", "no-waiting")


def start_engines(directory: str) -> subprocess.Popen[str]:
    """Start both engines, each at half of the budget and full."""
    half = str(BUDGET // 2)
    command = [sys.executable, str(ENGINE), "--ledger-dir", directory, "--instance", "a", "--instance", "b"]
    command += ["--startup-limit", half, "--idle", half]
    engines = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert engines.stdout is not None
    assert engines.stdout.readline().startswith("ready ")
    return engines


class Victim:
    """Moves the budget to and fro until it is killed."""

    def __init__(self, directory: str) -> None:
        self._terms = Terms(directory, ("a", "b"), Budget(BUDGET, in_bytes=False))
        self._observations = Observations(self._terms, Rules())

    def look(self) -> Mapping[str, InstanceLook]:
        """Look at both engines."""
        found = look_at_engines(self._terms.ledger_dir, ("a", "b"), Bound.LIMIT, lambda *_: True).instances
        self._observations.note(found, time.monotonic())
        return found

    def run(self) -> None:
        """Go round for ever, once the predecessor's lock is free."""
        with BudgetLock(self._terms.ledger_dir, self._terms.name):
            while True:
                self.go_round()

    def go_round(self) -> None:
        """Move most of the budget to the one that has less."""
        looks = self.look()
        takes = "a" if looks["a"].limit_tokens <= looks["b"].limit_tokens else "b"
        wanted = {name: LARGE if name == takes else SMALL for name in looks}
        decision = Decision(Verdict.MOVED, "", BUDGET, BUDGET, tuple(map(_party, looks.values())), wanted)
        publishing_round.PublishingRound(decision, self._terms, self._observations, self.look).run()


def _party(look: InstanceLook) -> Party:
    limit = look.limit_tokens
    party = Party(look.name, Standing.BALANCED, "", limit, limit, block_tokens=16)
    return replace(party, revision=look.revision, incarnation=look.incarnation)


def read(directory: str, into: Path) -> None:
    """Look until SIGTERM, then write how often, and the most that was seen."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    looks = above = largest = 0
    with LedgerDirectory(directory, writable=False) as opened:
        snapshot = look_at(opened)
        before: object = None
        while not stopped:
            snapshot = look_again(snapshot.path, snapshot.files)
            now = [_told(replica) for replica in snapshot.replicas]
            if now == before:  # slots are read one after the other: what two looks agree on was so in between
                held = sum(max(limits) for limits, _ in now)
                looks, above, largest = looks + 1, above + (held > BUDGET), max(largest, held)
            before = now
    into.write_text(json.dumps({"looks": looks, "above": above, "largest": largest}))


def _told(replica: Replica) -> tuple[list[int], list[int]]:
    """Return what an engine may hold or holds, and the revisions that tell one such moment from another."""
    desired, report = replica.slot.desired, replica.slot.report
    tokens = [desired.limit_tokens, report.applied.limit_tokens, report.idle_tokens]
    return tokens, [desired.revision, report.applied.revision]


def break_rounds(fault: str) -> None:
    """Break all rounds of this process and its children in one way."""
    if fault == "no-waiting":
        publishing_round.wait_until_applied = _applied_at_once
        ReplicaLook.held_tokens = ReplicaLook.limit_tokens  # type: ignore[method-assign]


def _applied_at_once(result: PublicationResult, _directory: str, _timeout_s: float) -> PublicationResult:
    return replace(result, applied=True)


def storm(directory: str, kills: int, rng: random.Random) -> dict[str, int]:
    """Kill that many victims, one after the other; what the reader saw meanwhile."""
    engines = start_engines(directory)
    into = Path(directory).parent / "reader.json"
    reader = fork(lambda: read(directory, into))
    begun = time.monotonic()
    for _ in range(3):
        Victim(directory).go_round()
    longest_s = (time.monotonic() - begun) / 3 * LONGEST_LIFE_ROUNDS
    try:
        for _ in range(kills):
            victim = fork(Victim(directory).run)
            time.sleep(rng.random() * longest_s)
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
    finally:
        os.kill(reader, signal.SIGTERM)
        os.waitpid(reader, 0)
        engines.kill()
        engines.communicate()
    seen: dict[str, int] = json.loads(into.read_text())
    return seen


def main() -> int:
    """Run a storm; 0 if no look was above the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    options = parser.parse_args()
    break_rounds(options.fault)
    with tempfile.TemporaryDirectory() as folder:
        directory = f"{folder}/ledgers"
        Path(directory).mkdir(mode=0o700)
        seen = storm(directory, options.kills, random.Random(options.seed))
    print(
        f"seed {options.seed}, kills {options.kills}: looks {seen['looks']}, above the budget {seen['above']}, "
        f"largest {seen['largest']} of {BUDGET}"
    )
    return 1 if seen["above"] else 0


if __name__ == "__main__":
    sys.exit(main())
