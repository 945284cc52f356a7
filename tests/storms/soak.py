"""The soak: a four-rank engine under load while everything around it goes wrong; its ranks must never differ.

Publications from other processes, publications left half-way (splits), publishers killed, the ledgers' file system
full, ledgers removed, cut short or replaced, the real-time clock stepping by hours, and single ranks stopped for a
while. In the end the report has to show equal digests and updates on all ranks, idle tokens within the limit after each
enforcement, and the last undisturbed publication applied.
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
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from children import fork

from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError
from kvcached.ledger.instances import get_instances
from kvcached.ledger.publication import publish
from kvcached.values import MAX_REVISION, Bound, Update

if TYPE_CHECKING:
    from collections.abc import Callable

INSTANCE = "soak"
RANKS = 4
LIMITS = (-1, 0, 7, 500, 5_000, 20_000, 80_000)
CAPS = (-1, 100, 60_000, 90_000)
"""One is below what a request needs, and rejected; the others leave room for all that run at once."""
LEDGER_KIB = 80
REQUESTS_PER_MINUTE = 1200  # at twice the generator's pace
READY_S = 180.0
HEAL_S = 30.0
LAST_LIMIT = 1234
SPEAK_S = 60.0

CLOCK_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += now->tv_sec / 7 % 3 * 7200 - 7200; /* back or forth every 7 s */
    return result;
}
"""


class Soak:
    """One run."""

    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        self.options = options
        self.directory = directory
        self.ledger_dir = f"{directory}/ledgers"
        os.mkdir(self.ledger_dir, 0o700)
        self.report = f"{directory}/report.json"
        self.random = random.Random(options.seed)
        self.did: dict[str, int] = {}
        self.mounted = mount(self.ledger_dir)
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        """Start the engine and wait until it takes publications."""
        requests = str(max(200, int(self.options.minutes * REQUESTS_PER_MINUTE)))
        command = [sys.executable, "-m", "kvcached.rig", "--tp", str(RANKS), "--instance", INSTANCE, "--check"]
        command += ["--ledger-dir", self.ledger_dir, "--requests", requests, "--speed", "2", "--linger", "1000000"]
        command += ["--report", self.report, "--seed", str(self.options.seed), "--capacity-tokens", "100000"]
        environment = {**os.environ, "KVCACHED_MAX_CACHED_TOKENS": "20000"}
        shim = build_shim(self.directory)
        if shim:
            environment["LD_PRELOAD"] = shim
            self.did["clock steps"] = int(self.options.minutes * 60 / 7)
        errors = open(f"{self.directory}/errors", "w", encoding="utf-8")  # noqa: SIM115 - the child's
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        errors.close()
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready "):
            fail("the engine did not start: " + Path(f"{self.directory}/errors").read_text("utf-8"))
        return process

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()]

    # What goes wrong

    def publish(self) -> None:
        """Publish a random limit or a random cap."""
        bound = self.random.choice((Bound.LIMIT, Bound.LIMIT, Bound.CAP))
        tokens = self.random.choice(CAPS if bound is Bound.CAP else LIMITS)
        publish(tokens, INSTANCE, self.ledger_dir, bound=bound)

    def publish_and_die(self) -> None:
        """Publish from a process that is killed after a random time."""
        limit, life_s = self.random.choice(LIMITS), self.random.random() * 0.01
        child = fork(partial(self._publish_for_ever, limit))
        time.sleep(life_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def _publish_for_ever(self, limit: int) -> None:
        while True:
            with suppress(LedgerDirectoryError):
                publish(limit, INSTANCE, self.ledger_dir)

    def split(self) -> None:
        """Write to some members only."""
        with LedgerDirectory(self.ledger_dir, writable=True) as directory:
            found = [
                (ledger, index, slot)
                for ledger in directory.open_all()
                for index, slot in ledger.handle.live_slots()
                if slot.identity.instance_name == INSTANCE
            ]
            newest = max((slot.desired.revision for _, _, slot in found), default=MAX_REVISION)
            if newest < MAX_REVISION:
                update = Update(newest + 1, self.random.choice(LIMITS))
                for ledger, index, slot in found[: self.random.randint(1, max(1, len(found) - 1))]:
                    with suppress(OSError):
                        ledger.handle.raise_desired(index, slot.incarnation, update)

    def stop_rank(self) -> None:
        """Stop one rank for a while."""
        with suppress(ProcessLookupError, IndexError):
            rank = self.random.choice(self.ranks())
            os.kill(rank, signal.SIGSTOP)
            time.sleep(self.random.random() * 0.5)
            os.kill(rank, signal.SIGCONT)

    def remove_ledger(self) -> None:
        """Remove, cut, or replace one ledger by nonsense that is then removed."""
        path = f"{self.ledger_dir}/cpu-{self.random.randrange(RANKS)}.ledger"
        way = self.random.randrange(3)
        with suppress(OSError):
            if way == 1:
                os.truncate(path, self.random.randrange(32768))
                time.sleep(self.random.random() * 0.2)
            os.unlink(path)
        if way == 2:
            with suppress(OSError):  # as on a full disk, which leaves an empty file
                Path(path).write_text("no ledger", encoding="utf-8")
            time.sleep(self.random.random() * 2)
            with suppress(OSError):
                os.unlink(path)

    def fill_disk(self) -> None:
        """Fill the file system of the ledgers, take one ledger away meanwhile, and make room again."""
        if not self.mounted:
            return
        filler = f"{self.ledger_dir}/filler"
        with suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        self.remove_ledger()
        with suppress(OSError), open(filler, "ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        time.sleep(self.random.random() * 2)
        os.unlink(filler)

    def run(self) -> dict[str, Any]:
        """Let things go wrong until the time is over; then see what the engine made of it."""
        chaos: list[tuple[Callable[[], None], int]] = [
            (self.publish, 40),
            (self.publish_and_die, 25),
            (self.split, 15),
            (self.stop_rank, 15),
            (self.remove_ledger, 4),
            (self.fill_disk, 1),
        ]
        started = spoken = time.monotonic()
        while time.monotonic() - started < self.options.minutes * 60:
            (act,) = self.random.choices([act for act, _ in chaos], [weight for _, weight in chaos])
            with suppress(LedgerDirectoryError):
                act()
            self.did[act.__name__] = self.did.get(act.__name__, 0) + 1
            if self.process.poll() is not None:
                fail("the engine ended: " + Path(f"{self.directory}/errors").read_text("utf-8")[-2000:])
            time.sleep(self.random.random() * 0.2)
            if time.monotonic() - spoken > SPEAK_S:
                spoken = time.monotonic()
                print(f"soak: {spoken - started:.0f} s, {self.did}", flush=True)
        self.heal()
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(HEAL_S * 4) != 0:
            fail("the engine ended with an error: " + Path(f"{self.directory}/errors").read_text("utf-8"))
        return dict(json.loads(Path(self.report).read_text("utf-8")))

    def heal(self) -> None:
        """Publish undisturbed until it is accepted, which may take a registration; then it has to be applied."""
        deadline = time.monotonic() + HEAL_S
        while not (result := publish(LAST_LIMIT, INSTANCE, self.ledger_dir)).accepted:
            if time.monotonic() > deadline:
                fail(f"the last publication was not accepted: {result.to_dict()}")
            time.sleep(0.2)
        wanted = Update(result.revision, LAST_LIMIT)
        while all(instance.replicas[0].applied != wanted for instance in get_instances(self.ledger_dir)):
            if time.monotonic() > deadline + HEAL_S:
                fail(f"the last publication was accepted and not applied: {result.to_dict()}")
            time.sleep(0.05)

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            for rank in self.ranks():
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        if self.mounted:
            subprocess.run(["umount", "--lazy", self.ledger_dir], check=False)


class Failure(Exception):  # noqa: N818 - it is the result of a run
    """A promise that was broken."""


def fail(sentence: str) -> NoReturn:
    """End the run with what was broken."""
    raise Failure(sentence)


def judge(report: dict[str, Any]) -> None:
    """Compare the ranks."""
    first = report["ranks"][0]
    for rank in report["ranks"]:
        if rank["digest"] != first["digest"]:
            fail("the ranks' caches differed at some step")
        keys = ("step", "revision", "limit_tokens", "evicted_tokens", "idle_tokens_after")
        if any([one[key] for one in rank["updates"]] != [one[key] for one in first["updates"]] for key in keys):
            fail("the ranks applied different updates")
        if rank["limit_breaches"]:
            fail(f"{rank['limit_breaches']} enforcements left too many idle tokens")
    revisions = [one["revision"] for one in first["updates"]]
    if any(later <= earlier for earlier, later in pairwise(revisions)):
        fail("a revision was applied after a newer one")
    if first["final_limit_tokens"] != LAST_LIMIT:
        fail("the last publication is not in force")


def mount(path: str) -> bool:
    """Mount a file system that is easily filled; False without the right to do so.

    It has room for the ledgers of all ranks and as many damaged ones that were set aside.
    """
    command = ["mount", "-t", "tmpfs", "-o", f"size={2 * RANKS * LEDGER_KIB + 100}k,mode=0700", "none", path]
    return os.getuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0


def build_shim(directory: str) -> str | None:
    """Build what lets the engine's real-time clock step; None without a compiler."""
    source, library = f"{directory}/clock.c", f"{directory}/clock.so"
    Path(source).write_text(CLOCK_SHIM, encoding="utf-8")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return library


def main() -> int:
    """Run a soak; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"soak: seed {options.seed}", flush=True)
    directory = tempfile.mkdtemp(prefix="kvcached-soak-")
    soak = Soak(options, directory)
    try:
        report = soak.run()
        judge(report)
    except Failure as failure:
        print(f"soak: FAILED: {failure}; {soak.did}", file=sys.stderr)
        return 1
    finally:
        soak.end()
        shutil.rmtree(directory, ignore_errors=True)
    updates = len(report["ranks"][0]["updates"])
    print(
        f"soak: {options.minutes} minutes, {soak.did}; {updates} updates applied, {report['requests']} requests; "
        f"digests equal on {RANKS} ranks"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
