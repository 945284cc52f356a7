"""A process that registers toy engines and applies publications through the product's own subscription and policy.

``python tests/support/toy_engine.py --instance a --gpus cpu-0,cpu-1 --ledger-dir DIR`` prints ``ready DIR`` once
everything is registered and serves until SIGTERM or the end of its standard input. It needs neither torch nor a
network, so a test can start many. What a test wants to see go wrong is chosen with ``--trouble``.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import time

from kvcached.ledger.subscription import Subscription
from kvcached.light_dataclasses import replace
from kvcached.policy import RetentionPolicy
from kvcached.values import UNLIMITED, Bound, BoundReport, Identity, Outcome, Report, Update

TROUBLES = ("none", "deaf", "locked", "eviction", "pipeline", "unsupported")
"""What may go wrong: nothing; publications are never taken; nothing is evictable; eviction raises; refused."""

STEP_S = 0.005
"""How long the scheduler sleeps between two looks at the ledger."""


class ToyCache:
    """A prefix cache that is nothing but its figures, in tokens."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.block_tokens = options.block_tokens
        self._idle = options.idle
        self._active = options.active
        self._capacity = options.capacity
        self._trouble = options.trouble

    def idle_tokens(self) -> int:
        """Return the idle tokens."""
        return int(self._idle)

    def active_tokens(self) -> int:
        """Return the tokens in use."""
        return int(self._active)

    def capacity_tokens(self) -> int:
        """Return the size."""
        return int(self._capacity)

    def evict(self, tokens: int) -> int:
        """Evict whole blocks, or do what was ordered instead."""
        if self._trouble == "eviction":
            message = "the block table is locked"
            raise RuntimeError(message)
        if self._trouble == "locked":
            return 0
        blocks = -(-tokens // self.block_tokens)
        evicted = min(self._idle, blocks * self.block_tokens)
        self._idle -= evicted
        return int(evicted)


class ToyEngine:
    """One replica: a subscription, a policy and a cache, stepped by hand."""

    def __init__(self, name: str, replica: int, options: argparse.Namespace) -> None:
        gpus = options.gpus.split(",")
        self._pp_size = 2 if options.trouble == "pipeline" else 1
        limit = options.startup_limit
        identity = Identity(name, options.engine, "1.0", replica, len(gpus), self._pp_size, limit, options.block_tokens)
        self._trouble = options.trouble
        self._cache = ToyCache(options)
        self._policy = RetentionPolicy(self._cache, limit, chunk_tokens=options.chunk_tokens)
        self._subscription = Subscription(identity, gpus, options.ledger_dir)
        self._token_bytes, self._floor = options.token_bytes, options.cap_floor
        self._cap = BoundReport(Update(0, UNLIMITED, Bound.CAP), 0, Outcome.STARTUP, "")

    def start(self) -> None:
        """Register and report."""
        self._subscription.start()
        self._subscription.acknowledge(self._report())

    @property
    def registered(self) -> bool:
        """Whether publishers can reach this engine now."""
        return self._subscription.registered

    def step(self) -> None:
        """Take over what was published, as a scheduler does at each step."""
        update = None if self._trouble in ("deaf", "unsupported") else self._subscription.poll()
        if update is not None:
            self._take(update)
        self._policy.on_step()
        if update is not None or self._policy.draining:
            self._subscription.acknowledge(self._report())
        self._subscription.refresh(self._report)

    def _take(self, update: Update) -> None:
        if update.bound is Bound.CAP:
            self._take_cap(update)
        elif self._trouble == "pipeline":
            reason = f"pp_size is {self._pp_size}; updates are applied with pp_size 1 only"
            self._policy.reject(update, Outcome.REJECTED_PIPELINE_PARALLEL, reason)
        else:
            self._policy.update(update)

    def _take_cap(self, update: Update) -> None:
        if 0 <= update.limit_tokens < self._floor:
            reason = f"one request of the longest length needs {self._floor} tokens"
            self._cap = BoundReport(self._cap.applied, update.revision, Outcome.REJECTED_BELOW_FLOOR, reason)
        else:
            self._cap = BoundReport(update, update.revision, Outcome.APPLIED, "")

    def _report(self) -> Report:
        if self._trouble == "unsupported":
            unlimited = Update(0, -1)
            reason = "hook target Scheduler.evict is missing"
            return Report(unlimited, 0, Outcome.UNSUPPORTED_ENGINE, reason, 0, 0, 0, 0, 0)
        report = replace(self._policy.report(), token_bytes=self._token_bytes)
        if not self._floor:
            return report
        pool = report.capacity_tokens * self._token_bytes
        held = pool if self._cap.applied.limit_tokens < 0 else self._cap.applied.limit_tokens * self._token_bytes
        return replace(
            report, cap=self._cap, pool_bytes=pool, resident_bytes=held, returned_bytes=pool - held, returns="yes"
        )

    def close(self) -> None:
        """Give the slots back."""
        self._subscription.close()


def main() -> None:
    """Serve until told to stop."""
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    replicas = range(options.first_replica, options.first_replica + options.replicas)
    engines = [ToyEngine(name, replica, options) for name in options.instance for replica in replicas]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for engine in engines:
        engine.start()
    while not all(engine.registered for engine in engines):
        time.sleep(STEP_S)
    print(f"ready {options.ledger_dir}", flush=True)
    while not _input_ended(options.step_s):
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.close()


def _input_ended(patience_s: float) -> bool:
    """Sleep for a step; True when the process that started this one has gone."""
    readable, _, _ = select.select([sys.stdin], [], [], patience_s)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instance", action="append", required=True, help="may be given several times")
    parser.add_argument("--ledger-dir", required=True)
    parser.add_argument("--gpus", default="cpu-0", help="comma-separated member ids")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--first-replica", type=int, default=0)
    parser.add_argument("--engine", default="toy")
    parser.add_argument("--startup-limit", type=int, default=16000)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--active", type=int, default=2_000)
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--token-bytes", type=int, default=0)
    parser.add_argument("--cap-floor", type=int, default=0, help="the engine knows caps, from this many tokens up")
    parser.add_argument("--chunk-tokens", type=int, default=65_536)
    parser.add_argument("--step-s", type=float, default=STEP_S)
    parser.add_argument("--trouble", choices=TROUBLES, default="none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
