"""The process around one rank: joins the group, runs the steps, hands its notes to the launcher."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvcached.ledger.registration import InstanceNameTakenError
from kvcached.ledger.subscription import Subscription
from kvcached.rig.advisor_hook import open_advised
from kvcached.rig.intake import Intake, PublicationSource
from kvcached.rig.null_subscription import NoSubscription
from kvcached.rig.rank import Rank
from kvcached.rig.request_feed import Feed
from kvcached.rig.step_broadcast import Exchange
from kvcached.values import Identity

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from kvcached.rig.config import RigConfig
    from kvcached.workload.request import Arrival

EXIT_PEER_LOST = 75
"""Exit code of a rank whose group broke, so that the launcher can tell the cause from its consequences."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ready:
    """Rank 0 takes publications from now on."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Rank 0 cannot start; the reason is one sentence for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """A rank has finished everything. ``totals`` is what the run as a whole did; all ranks say the same."""

    report: dict[str, Any]
    totals: dict[str, int]
    samples: list[dict[str, Any]] = field(repr=False)


def run_worker(config: RigConfig, arrivals: Iterable[Arrival], rank: int, store: Path, launcher: Connection) -> None:
    """Run ``rank`` to its end; the target of a process of its own."""
    _end_with_launcher()
    _quiet_other_ranks(rank)
    torch.set_num_threads(1)
    worker = Rank(config, rank)
    try:
        if rank == 0:
            collectives = _lead(config, arrivals, worker, store, launcher)
        else:
            collectives = _follow(worker, Exchange(rank, config.world_size, store))
    except InstanceNameTakenError as error:
        launcher.send(Refused(str(error)))
        return
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        sys.exit(EXIT_PEER_LOST)
    counts = worker.scheduler.counts
    totals = {
        "requests": counts.finished,
        "refused_requests": counts.refused,
        "hit_tokens": counts.hit_tokens,
        "prompt_tokens": counts.prompt_tokens,
    }
    launcher.send(Done({**worker.report(), "collectives": collectives}, totals, worker.samples))
    launcher.recv()  # the others may still read from this process; the launcher answers when all are done


def _lead(
    config: RigConfig,
    arrivals: Iterable[Arrival],
    worker: Rank,
    store: Path,
    launcher: Connection,
) -> int:
    """Run rank 0, the only one that knows of the ledger, the workload and the clock; return how many collectives."""
    subscription = _subscribe(config)
    feed = Feed(arrivals, config.speed)
    source = Intake(subscription, feed, worker.scheduler, worker.policy, config.linger_s)
    source.on_registered = lambda: launcher.send(Ready())
    signal.signal(signal.SIGTERM, lambda _signal, _frame: setattr(source, "stop_requested", True))
    worker.transport.waits_for_ranks = True
    subscription.start()
    advised = open_advised(config, worker, subscription)
    try:
        subscription.acknowledge(worker.policy.report())  # so that the startup limit shows before the first step
        exchange = Exchange(0, config.world_size, store)
        start_ns = time.monotonic_ns()
        exchange.send(start_ns)
        worker.start(start_ns)
        feed.start(start_ns / 1e9)
        going_on = True
        while going_on:
            message = replace(source.next_message(), confirm=worker.transport.unconfirmed)
            exchange.send(message)
            if message.confirm:
                exchange.confirm()
                worker.transport.confirm()
            settled_before = worker.policy.settled_revisions
            going_on = worker.step(message)
            source.after_step(settled=worker.policy.settled_revisions != settled_before)
            if advised is not None:
                advised.end_step(idle=worker.scheduler.unfinished == 0)
        return exchange.collectives
    finally:
        if advised is not None:
            advised.close()
        subscription.close()


def _follow(worker: Rank, exchange: Exchange) -> int:
    """Run a rank other than 0: wait for the next broadcast, work it off, and so on; return how many collectives."""
    worker.start(exchange.receive())
    going_on = True
    while going_on:
        message = exchange.receive()
        if message.confirm:
            exchange.confirm()
        going_on = worker.step(message)
    return exchange.collectives


def _subscribe(config: RigConfig) -> PublicationSource:
    settings = config.settings
    if settings.disabled:
        return NoSubscription()
    identity = Identity(
        instance_name=settings.instance_name,
        engine="rig",
        engine_version=f"torch {torch.__version__}",
        replica=0,
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        startup_limit_tokens=settings.startup_limit_tokens,
        startup_cap_tokens=settings.startup_cap_tokens,
        block_tokens=config.block_tokens,
    )
    return Subscription(identity, config.gpu_ids, settings.ledger_dir)


def _end_with_launcher() -> None:
    """Let the kernel kill this rank when the launcher dies, and leave Ctrl-C and SIGTERM to the launcher."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    if launcher is None or os.getppid() != launcher.pid:  # it died before the line above
        sys.exit(EXIT_PEER_LOST)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _quiet_other_ranks(rank: int) -> None:
    """Let rank 0 alone write warnings, since all ranks meet the same ones."""
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(message)s")
    if rank > 0:
        logging.getLogger("kvcached").setLevel(logging.CRITICAL)


def _is_lost_peer(error: RuntimeError) -> bool:
    """Tell an error of the group's transport, which has no type of its own, from any other."""
    return "gloo" in str(error)
