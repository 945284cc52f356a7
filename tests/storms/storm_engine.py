"""The engine under watch in a storm: it checks at each step what it applies, and that its ranks do the same."""

from __future__ import annotations

import hashlib
import pickle
import random
import socket
import struct
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from children import fork
from storm_record import BLOCK_TOKENS, GPUS, NUMBERS, RANKS, STARTUP_LIMIT, Shared, identity

from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.subscription import Subscription
from kvcached.light_dataclasses import replace
from kvcached.policy import RetentionPolicy
from kvcached.values import UNLIMITED, Bound, BoundReport, Outcome, Report, Update

if TYPE_CHECKING:
    from kvcached.ledger.contents import Slot

QUIET_OUTCOMES = {Outcome.APPLYING, Outcome.HELD, Outcome.EVICTION_FAILED}


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
    """Check I1 and I2 for a pair that is about to be applied, by what is stored in the files."""
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
