"""The kill storm: SIGKILL at random times against one live instance of eight members, with checks all along.

Victims are publishers, subscribers that share the ledgers, toy engines that fork their ranks, and real rigs. The
engine under watch is never killed: it checks at each step that what it applies stood in all members (I1), that
revisions only grow (I2), that its ranks do the same (I3), that nothing active is evicted (I5) and that idle tokens keep
to the limit (I6). Readers check that words only rise and that one revision means one limit everywhere. Between storms,
one undisturbed publication has to be accepted and applied (I4), whatever the dead left behind.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from children import fork
from storm_engine import run_engine
from storm_reader import run_reader
from storm_record import CAPS, COUNTERS, GPUS, LIMITS, VICTIMS_AT_ONCE, WATCHERS, Shared
from storm_victims import LIFETIME_S, VICTIMS, WEIGHTS, die_after

from kvcached.ledger.instances import get_instances
from kvcached.ledger.publication import publish
from kvcached.values import Bound, Update

if TYPE_CHECKING:
    from collections.abc import Callable

KILLS_PER_STORM = 400
HEAL_S = 20.0
RIG_PAUSE_S = 20.0
SPEAK_S = 30.0


class Storm:
    """One run: the actors, the killing and the figures."""

    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        self.figures = load(options.state, options.seed)
        self.seed = f"{self.figures['seed']}-{self.figures['runs']}"
        self.figures["runs"] += 1
        self.options = options
        self.directory = directory
        self.ledger_dir = f"{directory}/ledgers"
        os.mkdir(self.ledger_dir, 0o700)
        self.shared = Shared(directory)
        self.random = random.Random(self.seed)
        self.kills = dict.fromkeys([*VICTIMS, "rig"], 0)
        self.watchers: list[int] = []
        self.rig: subprocess.Popen[bytes] | None = None
        self.next_rig = 0.0
        self.slowest_heal_s = 0.0

    def fork(self, lane: int, run: Callable[[], None]) -> int:
        """Start a process of the storm; no other one that is alive may have its lane."""

        def count_apart() -> None:
            self.shared.lane = lane
            logging.disable(logging.CRITICAL)
            run()

        return fork(count_apart)

    def start(self) -> None:
        """Start the engine and the readers."""
        seed = self.random.randrange(2**32)
        self.watchers.append(self.fork(0, lambda: run_engine(self.ledger_dir, self.shared, seed)))
        deadline = time.monotonic() + HEAL_S
        while not self.is_up():
            if time.monotonic() > deadline:
                message = "storm: the engine did not register"
                raise SystemExit(message)
            time.sleep(0.01)
        for lane in range(1, WATCHERS):
            self.watchers.append(self.fork(lane, lambda: run_reader(self.ledger_dir, self.shared)))

    def is_up(self) -> bool:
        """Return whether the engine is registered in all its ledgers."""
        instances = get_instances(self.ledger_dir)
        return bool(instances) and len(instances[0].replicas[0].members) == len(GPUS)

    def storm(self, kills: int) -> None:
        """Start victims that die at random points, by their own processor time as far as they do not sleep."""
        alive: list[tuple[int, str]] = []
        for number in range(kills):
            if len(alive) >= VICTIMS_AT_ONCE:
                self.bury(*alive.pop(0))
            (kind,) = self.random.choices(list(VICTIMS), WEIGHTS)
            alive.append((self.fork(WATCHERS + number % VICTIMS_AT_ONCE, self.victim(kind)), kind))
        for pid, kind in alive:
            self.bury(pid, kind)

    def victim(self, kind: str) -> Callable[[], None]:
        """Return what a victim does."""
        seed = self.random.randrange(2**32)
        after_s = self.random.random() * LIFETIME_S[kind]
        clock = time.CLOCK_MONOTONIC if kind == "forking engine" else time.CLOCK_PROCESS_CPUTIME_ID

        def run() -> None:
            die_after(after_s, clock)
            VICTIMS[kind](self.ledger_dir, random.Random(seed), self.shared)

        return run

    def bury(self, pid: int, kind: str) -> None:
        """Wait for a victim's end; it must not have been any other one."""
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            self.shared.violate(f"a {kind} ended with status {status}")
        self.kills[kind] += 1

    def check_rest(self) -> None:
        """Check what holds when nobody disturbs: the dead are gone, and a publication is accepted and applied."""
        started = time.monotonic()
        deadline = started + HEAL_S
        limit, cap = self.random.choice(LIMITS), self.random.choice(CAPS)
        capped = publish(cap, "target", self.ledger_dir, bound=Bound.CAP)
        result = publish(limit, "target", self.ledger_dir)
        if not result.accepted or not capped.accepted:
            self.shared.violate(f"I4: an undisturbed publication was {result.status}: {result.to_dict()}")
        while True:
            instances = {instance.name: instance for instance in get_instances(self.ledger_dir)}
            ghosts = [name for name in instances if name.startswith("sub-")]
            replica = instances["target"].replicas[0]
            applied = (replica.applied, replica.cap.applied)
            if applied == (Update(result.revision, limit), Update(capped.revision, cap, Bound.CAP)) and not ghosts:
                break
            if time.monotonic() > deadline:
                self.shared.violate(f"I4: {result.revision}, {capped.revision} not applied but {applied}, or {ghosts}")
                break
            time.sleep(0.002)
        self.slowest_heal_s = max(self.slowest_heal_s, time.monotonic() - started)
        for watcher in self.watchers:
            if os.waitpid(watcher, os.WNOHANG) != (0, 0):
                self.watchers.remove(watcher)
                self.shared.violate("the engine or a reader ended")

    def tend_rig(self) -> None:
        """Kill the running rig, all its processes at once, or start one."""
        now = time.monotonic()
        if self.options.no_rigs or now < self.next_rig:
            return
        if self.rig is None:
            command = [sys.executable, "-m", "kvcached.rig", "--tp", "2", "--instance", f"rig-{self.kills['rig']}"]
            command += ["--ledger-dir", self.ledger_dir, "--requests", "100000", "--linger", "600"]
            self.rig = subprocess.Popen(
                command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self.next_rig = now + self.random.uniform(1, RIG_PAUSE_S)
        else:
            self.end_rig()
            self.next_rig = now + RIG_PAUSE_S

    def end_rig(self) -> None:
        """Kill a rig as a whole."""
        if self.rig is not None:
            os.killpg(self.rig.pid, signal.SIGKILL)
            self.rig.wait()
            self.kills["rig"] += 1
            self.rig = None

    def run(self) -> None:
        """Alternate storms and rests until the time or the number is over."""
        self.start()
        started = time.monotonic()
        spoken = started
        try:
            while time.monotonic() - started < self.options.minutes * 60 and self.total() < self.options.kills:
                self.tend_rig()
                self.storm(min(KILLS_PER_STORM, self.options.kills - self.total()))
                self.check_rest()
                self.save(time.monotonic() - started)
                if time.monotonic() - spoken > SPEAK_S:
                    spoken = time.monotonic()
                    print(self.line(spoken - started), flush=True)
                if self.shared.violations():
                    break
        finally:
            self.end_rig()
            for watcher in reversed(self.watchers):  # the engine last, which the readers want to see
                os.kill(watcher, signal.SIGKILL)
                os.waitpid(watcher, 0)
            self.save(time.monotonic() - started)
        print(self.line(time.monotonic() - started))

    def total(self) -> int:
        """Return the number of kills of this run."""
        return sum(self.kills.values())

    def line(self, elapsed_s: float) -> str:
        """Return this run's figures as a line."""
        counts = ", ".join(f"{name} {self.shared.get(name)}" for name in COUNTERS)
        kills = ", ".join(f"{kind} {count}" for kind, count in self.kills.items())
        return (
            f"storm: seed {self.seed}, {elapsed_s:.0f} s, {self.total()} kills ({kills}); {counts}; "
            f"slowest heal {self.slowest_heal_s * 1e3:.0f} ms; violations {len(self.shared.violations())}"
        )

    def save(self, elapsed_s: float) -> None:
        """Add this run's figures to those of the runs before, and write them down."""
        if self.options.state is None:
            return
        total = dict(self.figures)
        total["seconds"] += elapsed_s
        total["violations"] = total["violations"] + self.shared.violations()
        total["slowest_heal_s"] = max(total["slowest_heal_s"], self.slowest_heal_s)
        for group, counts in (("kills", self.kills), ("counts", {name: self.shared.get(name) for name in COUNTERS})):
            total[group] = {name: total[group].get(name, 0) + count for name, count in counts.items()}
        temporary = f"{self.options.state}.new"
        Path(temporary).write_text(json.dumps(total, indent=1), encoding="utf-8")
        os.replace(temporary, self.options.state)


def load(state: str | None, seed: int | None) -> dict:
    """Return the figures of earlier runs, or none."""
    if state is not None and os.path.exists(state):
        return dict(json.loads(Path(state).read_text(encoding="utf-8")))
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    return {"seed": seed, "runs": 0, "seconds": 0.0, "kills": {}, "counts": {}, "violations": [], "slowest_heal_s": 0.0}


def main() -> int:
    """Run a storm; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--kills", type=int, default=2**62, help="stop after so many")
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--state", help="file that keeps the figures over several runs")
    parser.add_argument("--no-rigs", action="store_true", help="without the rigs, which need torch")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    directory = tempfile.mkdtemp(prefix="kvcached-storm-")
    try:
        storm = Storm(options, directory)
        storm.run()
        violations = storm.shared.violations()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for violation in violations[:20]:
        print(f"storm: VIOLATION {violation}", file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
