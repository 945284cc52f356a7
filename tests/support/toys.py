"""A toy cache and the few calls that make an engine of it, for tests that need no process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvcached.values import Identity, Report

if TYPE_CHECKING:
    from kvcached.ledger.subscription import Subscription
    from kvcached.policy import RetentionPolicy
    from kvcached.values import Update


class ToyCache:
    """A prefix cache that is two numbers: enough to be governed, small enough to be obviously right."""

    def __init__(self, idle: int = 0, active: int = 0, block_tokens: int = 16) -> None:
        self.block_tokens = block_tokens
        self.idle = idle
        self.active = active
        self.evictable = True
        self.error: Exception | None = None
        self.evictions: list[int] = []

    def idle_tokens(self) -> int:
        return self.idle

    def active_tokens(self) -> int:
        return self.active

    def capacity_tokens(self) -> int:
        return 1_000_000

    def evict(self, tokens: int) -> int:
        if self.error is not None:
            raise self.error
        blocks = -(-tokens // self.block_tokens)
        evicted = min(blocks * self.block_tokens, self.idle) if self.evictable else 0
        self.idle -= evicted
        self.evictions.append(evicted)
        return evicted


def identity(name: str = "engine", *, replica: int = 0, startup: int = 16000, pp_size: int = 1) -> Identity:
    """Return an identity with everything but the essentials at a default."""
    return Identity(
        name, "toy", "1.0", replica, tp_size=2, pp_size=pp_size, startup_limit_tokens=startup, block_tokens=16
    )


def poll_now(subscription: Subscription) -> Update | None:
    """Poll after a look into the ledger, which the watcher would take a moment later."""
    subscription.wait(time.monotonic())
    return subscription.poll()


def settle(subscription: Subscription, policy: RetentionPolicy) -> Report:
    """Do what an engine does at one step: poll, apply, acknowledge."""
    update = poll_now(subscription)
    if update is not None:
        policy.update(update)
    policy.on_step()
    report = policy.report()
    subscription.acknowledge(report)
    return report
