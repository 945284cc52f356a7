"""Processes that use the product and write down what they did: publishers, an engine with its ranks, observers.

``python -m history.run ROLE OPTIONS...`` (with ``tests`` on the path) runs one and writes its record as JSON to
``--record``. A publisher waits for a line on its standard input before it begins.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

from support.capped import NO_CAP_YET, CappedPolicy
from support.toys import poll_now

from history import seeded_faults
from history.recorder import GPUS, MEMBERS, RecordingHandle, pair
from kvcached.ledger import binding, publication
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.registration import Beginning, register
from kvcached.values import Bound, Identity, Update

RANKS = 4
INITIAL = {Bound.LIMIT: Update(0, 16000), Bound.CAP: NO_CAP_YET}
PAUSE_S = 0.0002


def publisher(options: argparse.Namespace) -> dict[str, Any]:
    """Publish limits and caps in turn, numbers that nobody else publishes, as fast as possible."""
    binding.Handle = RecordingHandle  # type: ignore[misc]
    seeded_faults.break_publisher(options.fault)
    results = []
    for number in range(options.count):
        limit = options.seed * 1_000_000 + number
        bound = (Bound.LIMIT, Bound.CAP)[(number + options.seed) % 2]
        result = publication.publish(limit, "engine", options.ledger_dir, bound=bound)
        results.append([result.status, bound.value, [result.revision, limit]])
    return {"raises": RecordingHandle.raises, "results": results}


def observer(options: argparse.Namespace) -> dict[str, Any]:
    """Read the words of all members, in random order, until told to stop."""
    generator = random.Random(options.seed)
    looks: list[list[Any]] = []
    applied = dict.fromkeys(Bound, 0)
    with LedgerDirectory(options.ledger_dir, writable=False) as directory:
        ledgers = list(enumerate(directory.open_all()))
        while not stopped:
            member, ledger = generator.choice(ledgers)
            start = time.monotonic_ns()
            slot = ledger.handle.read_slot(0)
            end = time.monotonic_ns()
            if slot is None:
                continue
            looks += [[start, end, member, bound.value, pair(slot.desired_of(bound))] for bound in Bound]
            for bound in Bound if member == 0 and slot.consistent else ():
                revision = slot.report.of(bound).applied.revision
                assert revision >= applied[bound], "the applied revision went back"
                applied[bound] = revision
            time.sleep(PAUSE_S)
    return {"looks": looks}


def engine(options: argparse.Namespace) -> dict[str, Any]:
    """Poll, broadcast to the ranks, apply and acknowledge, as a scheduler does, until told to stop."""
    identity = engine_identity(RANKS)
    subscription = seeded_faults.subscription_class(options.fault)(identity, GPUS, options.ledger_dir)
    policies, pipes = _start_ranks(options)
    subscription.start()
    subscription.acknowledge(policies.report())
    print("ready", flush=True)
    generator = random.Random(options.seed)
    polls, applies = [], []
    step, quiet_since = 0, time.monotonic()
    while not stopped or time.monotonic() < quiet_since + 0.2:
        step += 1
        settled = {bound: policies.settled(bound) for bound in Bound}
        start = time.monotonic_ns()
        update = poll_now(subscription)
        end = time.monotonic_ns()
        polls.append([start, end, *_polled(update), {bound.value: revision for bound, revision in settled.items()}])
        if update is not None and update.revision > settled[update.bound]:
            quiet_since = time.monotonic()
        if update is not None and generator.random() < 0.25:
            update = None  # no room in this step: it is for poll to return it again
        _broadcast(pipes, step, update)
        if update is not None:
            policies.update(update)
            applies.append([time.monotonic_ns(), 0, step, update.bound.value, pair(update)])
            subscription.acknowledge(policies.report())
        time.sleep(PAUSE_S)
    applies += _collect(pipes)
    with LedgerDirectory(options.ledger_dir, writable=False) as directory:
        slots = [slot for ledger in directory.open_all() for _, slot in ledger.handle.live_slots()]
    final = {bound.value: [pair(slot.desired_of(bound)) for slot in slots] for bound in Bound}
    subscription.close()
    return {"polls": polls, "applies": applies, "final": final}


def engine_identity(tp_size: int) -> Identity:
    """Return who all engines of these histories are."""
    return Identity("engine", "toy", "1", 0, tp_size, 1, INITIAL[Bound.LIMIT].limit_tokens, 16)


def _polled(update: Update | None) -> tuple[str | None, list[int] | None]:
    return (None, None) if update is None else (update.bound.value, pair(update))


def _broadcast(pipes: list[tuple[int, int]], step: int, update: Update | None) -> None:
    if update is not None:
        message = pickle.dumps((step, update))
        for to_rank, _ in pipes:
            os.write(to_rank, struct.pack("<I", len(message)) + message)


def _start_ranks(options: argparse.Namespace) -> tuple[CappedPolicy, list[tuple[int, int]]]:
    """Fork the other ranks, each at the end of a pipe; the policy of rank 0 and the pipes."""
    pipes = []
    for rank in range(1, RANKS):
        to_rank, from_rank = os.pipe(), os.pipe()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.close(to_rank[1])
            for earlier, _ in pipes:
                os.close(earlier)
            _rank(rank, to_rank[0], from_rank[1], options.fault)
            os._exit(0)
        os.close(to_rank[0])
        os.close(from_rank[1])
        pipes.append((to_rank[1], from_rank[0]))
    return CappedPolicy(engine_identity(RANKS)), pipes


def _rank(rank: int, source: int, target: int, fault: str) -> None:
    policy = CappedPolicy(engine_identity(RANKS))
    applies = []
    while header := os.read(source, 4):
        step, update = pickle.loads(os.read(source, struct.unpack("<I", header)[0]))  # noqa: S301 - our own
        if seeded_faults.rank_skips(fault, rank, len(applies)):
            continue
        policy.update(update)
        applies.append([time.monotonic_ns(), rank, step, update.bound.value, pair(update)])
    with os.fdopen(target, "w") as file:
        json.dump(applies, file)


def _collect(pipes: list[tuple[int, int]]) -> list[Any]:
    applies = []
    for to_rank, _ in pipes:
        os.close(to_rank)
    for _, from_rank in pipes:
        with os.fdopen(from_rank) as file:
            applies += json.load(file)
    return applies


def holder(options: argparse.Namespace) -> dict[str, Any]:
    """Hold a registration without ever looking at it, until told to stop."""
    beginning = Beginning(tuple(INITIAL.values()))
    registration = register(engine_identity(MEMBERS), GPUS, options.ledger_dir, beginning)
    print("ready", flush=True)
    while not stopped:
        time.sleep(0.01)
    registration.close()
    return {}


stopped = False


def _stop(_number: int, _frame: object) -> None:
    global stopped  # noqa: PLW0603 - a signal handler's only way
    stopped = True


ROLES = {"publisher": publisher, "observer": observer, "engine": engine, "holder": holder}


def main() -> None:
    """Run one actor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--ledger-dir", required=True)
    parser.add_argument("--record", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--fault", default="none")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    if options.role == "publisher":
        sys.stdin.readline()
    record = ROLES[options.role](options)
    options.record.write_text(json.dumps(record))
