"""The kill storm: SIGKILL at random times against one live instance of eight members, with checks all along.

Victims are publishers, subscribers that share the ledgers, toy engines that fork their ranks, and real rigs. The
engine under watch is never killed: it checks at each step that what it applies stood in all members (I1), that
revisions only grow (I2), that its ranks do the same (I3), that nothing active is evicted (I5) and that idle tokens keep
to the limit (I6). Readers check that words only rise and that one revision means one limit everywhere. Between storms,
one undisturbed publication has to be accepted and applied (I4), whatever the dead left behind.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import logging
import mmap
import os
import pickle
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from children import fork

from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.instances import get_instances
from kvcached.ledger.publication import publish
from kvcached.ledger.subscription import Subscription
from kvcached.light_dataclasses import replace
from kvcached.policy import RetentionPolicy
from kvcached.values import UNLIMITED, Bound, BoundReport, Identity, Outcome, Report, Update

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.ledger.contents import Slot
    from kvcached.ledger.instances import ReplicaStatus

GPUS = tuple(f"cpu-{index}" for index in range(8))
RANKS = 3
STARTUP_LIMIT = 16000
BLOCK_TOKENS = 16
VICTIMS_AT_ONCE = 4
WATCHERS = 3
LANES = WATCHERS + VICTIMS_AT_ONCE
KILLS_PER_STORM = 400
HEAL_S = 20.0
RIG_PAUSE_S = 20.0
SPEAK_S = 30.0
LIMITS = (UNLIMITED, 0, 1, 100, 5_000, 50_000, 2**31 - 1)
CAPS = (2, 200, 6_000, 60_000, 2**31 - 2)
NUMBERS = {Bound.LIMIT: LIMITS, Bound.CAP: CAPS}
"""What is published of each bound: nothing that is published of the other."""

COUNTERS = ("publications", "accepted", "applied", "splits", "healed", "looks")
QUIET_OUTCOMES = {Outcome.APPLYING, Outcome.HELD, Outcome.EVICTION_FAILED}


class Shared:
    """Counters and violations that all processes of a storm write. Each process counts in a lane of its own."""

    def __init__(self, directory: str) -> None:
        self._memory = mmap.mmap(-1, 8 * len(COUNTERS) * LANES)
        self._violations = os.open(f"{directory}/violations", os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600)
        self._path = f"{directory}/violations"
        self.lane = 0

    def add(self, name: str, count: int = 1) -> None:
        """Count something."""
        at = 8 * (self.lane * len(COUNTERS) + COUNTERS.index(name))
        struct.pack_into("<Q", self._memory, at, struct.unpack_from("<Q", self._memory, at)[0] + count)

    def get(self, name: str) -> int:
        """Return a count."""
        lanes = struct.unpack_from(f"<{len(COUNTERS) * LANES}Q", self._memory)
        return sum(lanes[COUNTERS.index(name) :: len(COUNTERS)])

    def violate(self, text: str) -> None:
        """Write a violation down."""
        os.write(self._violations, f"{text}\n".encode())

    def violations(self) -> list[str]:
        """Return what was written down."""
        return Path(self._path).read_text(encoding="utf-8").splitlines()


def identity(name: str) -> Identity:
    """Return who an engine of the storm is."""
    return Identity(name, "storm", "1", 0, RANKS, 1, STARTUP_LIMIT, BLOCK_TOKENS)


# The engine under watch


class Cache:
    """A cache of blocks: enough to see that nothing in use is evicted, and what was evicted in which order."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.idle: list[int] = []
        self.active: list[int] = []
        self._next = 0
        self.digest = hashlib.sha256()

    def idle_tokens(self) -> int:
        """Return the tokens of idle blocks."""
        return len(self.idle) * BLOCK_TOKENS

    def active_tokens(self) -> int:
        """Return the tokens of blocks in use."""
        return len(self.active) * BLOCK_TOKENS

    def capacity_tokens(self) -> int:
        """Return the size."""
        return 1_000_000

    def evict(self, tokens: int) -> int:
        """Evict from the oldest on."""
        blocks = min(len(self.idle), -(-tokens // BLOCK_TOKENS))
        for block in self.idle[:blocks]:
            self.digest.update(struct.pack("<I", block))
        del self.idle[:blocks]
        return blocks * BLOCK_TOKENS

    def work(self) -> None:
        """Take some blocks into use, as requests do."""
        for _ in range(self._random.randrange(60)):
            self._next = (self._next + 1) % 2**32
            self.active.append(self._next)

    def release(self) -> None:
        """Give all blocks back."""
        self.idle += self.active
        self.active.clear()
        del self.idle[: max(0, len(self.idle) - 4000)]


class Rank:
    """One rank: cache and policy, stepped with what rank 0 took."""

    def __init__(self, seed: int, shared: Shared) -> None:
        self.cache = Cache(seed)
        self.policy = RetentionPolicy(self.cache, STARTUP_LIMIT, chunk_tokens=20_000)
        self.cap = BoundReport(Update(0, UNLIMITED, Bound.CAP), 0, Outcome.STARTUP, "")
        self._shared = shared

    def step(self, update: Update | None) -> bytes:
        """Do one step and return the digest of everything evicted so far."""
        self.cache.work()
        before = list(self.cache.active)
        if update is not None and update.bound is Bound.LIMIT:
            self.policy.update(update)
        elif update is not None:
            self.cap = BoundReport(update, update.revision, Outcome.APPLIED, "")
        self.policy.on_step()
        if self.cache.active != before:
            self._shared.violate("I5: an active block was evicted")
        self.cache.release()
        self.policy.on_release()
        limit = self.policy.limit_tokens
        allowed = max(limit, BLOCK_TOKENS) if limit > 0 else limit
        if limit >= 0 and self.cache.idle_tokens() > allowed and self.policy.report().outcome not in QUIET_OUTCOMES:
            self._shared.violate(f"I6: {self.cache.idle_tokens()} idle tokens under the limit {limit}")
        return self.cache.digest.digest()

    def report(self) -> Report:
        """Return what the engine says of both bounds."""
        return replace(self.policy.report(), cap=self.cap)


def run_rank(seed: int, shared: Shared, others_end: socket.socket, link: socket.socket) -> None:
    """Work off what rank 0 sends, in order. The other end is rank 0's alone, or its death would not be seen."""
    others_end.close()
    rank = Rank(seed, shared)
    with suppress(ConnectionError), link.makefile("rwb") as stream:  # a killed engine resets it
        while header := stream.read(4):
            update = pickle.loads(stream.read(struct.unpack("<I", header)[0]))  # noqa: S301 - from rank 0 alone
            stream.write(rank.step(update))
            stream.flush()


def run_engine(ledger_dir: str, shared: Shared, seed: int) -> None:
    """Serve as the instance "target" until the storm is over."""
    subscription = Subscription(identity("target"), GPUS, ledger_dir)
    subscription.start()
    links = []
    for _ in range(1, RANKS):
        ours, theirs = socket.socketpair()
        fork(partial(run_rank, seed, shared, ours, theirs))
        theirs.close()
        links.append(ours.makefile("rwb"))
    rank = Rank(seed, shared)
    subscription.acknowledge(rank.report())
    with LedgerDirectory(ledger_dir, writable=False) as directory:
        handles = [directory.open(gpu).handle for gpu in sorted(GPUS)]
        slots = [next(i for i, slot in h.live_slots() if slot.identity.instance_name == "target") for h in handles]
        while True:
            update = subscription.poll() if subscription.wait(time.monotonic() + 0.005) else None
            if update is not None:
                found = [handle.read_slot(index) for handle, index in zip(handles, slots, strict=True)]
                check_applied(update, rank.report(), found, shared)
            message = pickle.dumps(update)
            for link in links:
                link.write(struct.pack("<I", len(message)) + message)
                link.flush()
            digest = rank.step(update)
            if any(link.read(32) != digest for link in links):
                shared.violate("I3: ranks evicted different blocks")
            subscription.acknowledge(rank.report())


def check_applied(update: Update, report: Report, slots: list[Slot | None], shared: Shared) -> None:
    """Check I1 and I2 for a pair that is about to be applied, by what stands in the files."""
    shared.add("applied")
    if update.limit_tokens not in NUMBERS[update.bound]:
        shared.violate(f"{update} was published of the other bound")
    settled = report.of(update.bound).settled_revision
    if update.revision <= settled:
        shared.violate(f"I2: {update} after {settled}")
    for slot in slots:
        desired = None if slot is None else slot.desired_of(update.bound)
        if desired is None or desired.revision < update.revision:
            shared.violate(f"I1: {update} does not stand in all members: {desired}")
        elif desired.revision == update.revision and desired != update:
            shared.violate(f"I1: {update} stands as {desired} in a member")


def run_reader(ledger_dir: str, shared: Shared) -> None:
    """Look at the instance again and again: words only rise, and a revision of a bound means one number."""
    limits: dict[Bound, dict[int, int]] = {bound: {} for bound in Bound}
    newest = {bound: dict.fromkeys(GPUS, 0) for bound in Bound}
    applied, split = dict.fromkeys(Bound, 0), False
    while True:
        (status,) = [instance for instance in get_instances(ledger_dir) if instance.name == "target"] or [None]
        if status is None or len(status.replicas[0].members) != len(GPUS):
            shared.violate(f"the live instance was not seen whole: {status}")
            continue
        replica = status.replicas[0]
        for bound in Bound:
            check_members(replica, bound, newest[bound], limits[bound], shared)
            now = replica.cap.applied if bound is Bound.CAP else replica.applied
            if now.revision < applied[bound]:
                shared.violate(f"applied {bound.value} went back from {applied[bound]} to {now.revision}")
            if limits[bound].get(now.revision, now.limit_tokens) != now.limit_tokens:
                shared.violate(f"{now} was applied, which was never published")
            applied[bound] = now.revision
        if replica.split and not split:
            shared.add("splits")
        if split and not replica.split:
            shared.add("healed")
        split = replica.split
        shared.add("looks")
        time.sleep(0.002)
        for bound, known in limits.items():
            for revision in [revision for revision in known if revision < min(newest[bound].values()) - 100]:
                del known[revision]


def check_members(
    replica: ReplicaStatus, bound: Bound, newest: dict[str, int], limits: dict[int, int], shared: Shared
) -> None:
    """Check that no word of ``bound`` went back, and that none of its revisions has two limits."""
    for member in replica.members:
        word = member.cap if bound is Bound.CAP else Update(member.revision, member.limit_tokens)
        if word.revision < newest[member.gpu]:
            shared.violate(f"{member.gpu} went back from {bound.value} {newest[member.gpu]} to {word.revision}")
        newest[member.gpu] = word.revision
        if limits.setdefault(word.revision, word.limit_tokens) != word.limit_tokens:
            shared.violate(f"revision {word.revision} of the {bound.value} has two numbers")


# Victims


def be_publisher(ledger_dir: str, generator: random.Random, shared: Shared) -> None:
    """Publish one thing after the other, limits and caps."""
    while True:
        shared.add("publications")
        bound = generator.choice(tuple(Bound))
        if publish(generator.choice(NUMBERS[bound]), "target", ledger_dir, bound=bound, note="storm").accepted:
            shared.add("accepted")


def be_subscriber(ledger_dir: str, generator: random.Random, _shared: Shared) -> None:
    """Register in all ledgers, poll, report and leave, again and again."""
    policy = RetentionPolicy(Cache(1), STARTUP_LIMIT)
    while True:
        subscription = Subscription(identity(f"sub-{os.getpid()}"), GPUS, ledger_dir)
        subscription.start()
        for _ in range(generator.randrange(20)):
            subscription.poll()
            subscription.acknowledge(policy.report())
            policy.on_step()
        subscription.close()


def be_forking_engine(ledger_dir: str, _generator: random.Random, _shared: Shared) -> None:
    """Register, then fork ranks that live on after this process is killed."""
    subscription = Subscription(identity(f"fork-{os.getpid()}"), GPUS, ledger_dir)
    subscription.start()
    for _ in range(2):
        fork(partial(time.sleep, 0.2))
    while True:
        subscription.wait(time.monotonic() + 1)


VICTIMS: dict[str, Callable[[str, random.Random, Shared], None]] = {
    "publisher": be_publisher,
    "subscriber": be_subscriber,
    "forking engine": be_forking_engine,
}
WEIGHTS = (80, 15, 5)
LIFETIME_S = {"publisher": 0.006, "subscriber": 0.012, "forking engine": 0.05}


class _SignalEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("pad", ctypes.c_char * 48),
    )


_SIGEV_SIGNAL = 0


def die_after(seconds: float, clock: int) -> None:
    """Let the kernel send SIGKILL to this process after so much time of a clock, wherever it is then."""
    libc = ctypes.CDLL(None, use_errno=True)
    event = _SignalEvent(None, signal.SIGKILL, _SIGEV_SIGNAL, b"")
    timer = ctypes.c_void_p()
    span = (ctypes.c_long * 4)(0, 0, 0, max(1, int(seconds * 1e9)))
    if libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)) or libc.timer_settime(timer, 0, span, None):
        raise OSError(ctypes.get_errno(), "no timer")


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
