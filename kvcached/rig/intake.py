"""Rank 0's side of the steps: what arrives, what was published, when to rest and when to end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.ledger.registration import SlotPlace
    from kvcached.replica_policy import ReplicaPolicy
    from kvcached.rig.request_feed import Feed
    from kvcached.rig.scheduler import Scheduler
    from kvcached.values import Report, Update
    from kvcached.workload.request import Request

_LOOK_UP_S = 0.25
"""How long rank 0 rests at most before it looks whether it was told to end. Publications wake it at once."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The last item of a run: all ranks end after the step that brings it."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one broadcast carries: items to process in order, and when rank 0 gathered them (monotonic, ns)."""

    items: list[Request | Update | Stop]
    taken_ns: int
    confirm: bool = False
    """Whether rank 0 waits for all ranks to have finished the steps before this one."""


class PublicationSource(Protocol):
    """The part of a subscription that an engine which idles by itself needs."""

    @property
    def registered(self) -> bool:
        """Whether publishers can reach this engine now."""

    def place(self) -> SlotPlace | None:
        """Return the engine's slots in the ledgers, or None without a registration."""

    def start(self) -> None:
        """Start accepting publications."""

    def poll(self) -> Update | None:
        """Return the newest publication that is not settled yet."""

    def acknowledge(self, report: Report) -> None:
        """Report the current state to publishers."""

    def refresh(self, report_of: Callable[[], Report], *, idle: bool = False) -> None:
        """Report the current state to publishers, if the last report is old or the engine goes to sleep."""

    def wait(self, deadline: float) -> bool:
        """Sleep until something is published or the monotonic clock shows ``deadline``."""

    def close(self) -> None:
        """Take no more publications."""


class Intake:
    """Gathers the items of each step on rank 0, sleeping while there are none."""

    def __init__(
        self,
        subscription: PublicationSource,
        feed: Feed,
        scheduler: Scheduler,
        policy: ReplicaPolicy,
        linger_s: float,
    ) -> None:
        """Serve ``feed`` to ``scheduler``, then take publications for ``linger_s`` seconds more."""
        self.stop_requested = False
        """Set from a signal handler to end the run after the next step."""
        self.on_registered: Callable[[], None] | None = None
        """Called once, when publications are taken for the first time."""
        self._subscription = subscription
        self._feed = feed
        self._scheduler = scheduler
        self._policy = policy
        self._linger_s = linger_s
        self._end: float | None = None
        self._told_idle = False
        self._was_draining = False

    def next_message(self) -> Message:
        """Return what the next step has to work off, waiting for it if there is nothing to do at all."""
        while True:
            self._announce()
            now = time.monotonic()
            items: list[Request | Update | Stop] = [*self._feed.take(now, self._scheduler.unfinished)]
            update = self._subscription.poll()
            if update is not None:
                items.append(update)
            working = self._scheduler.unfinished > 0 or self._policy.draining
            if self.stop_requested or self._is_over(now, busy=bool(items) or working):
                items.append(Stop())
            if items or working or self._is_due(now):
                self._told_idle = False
                return Message(items, time.monotonic_ns())
            self._rest(now)

    def after_step(self, *, settled: bool) -> None:
        """Tell publishers how the step ended; ``settled`` says whether an update was applied or rejected in it."""
        draining = self._policy.draining
        if settled or draining or self._was_draining:
            self._subscription.acknowledge(self._policy.report())
        else:
            self._subscription.refresh(self._policy.report)
        self._was_draining = draining

    def _announce(self) -> None:
        """Say that publications are taken, as soon as they are."""
        if self.on_registered is not None and self._subscription.registered:
            self.on_registered()
            self.on_registered = None

    def _is_over(self, now: float, *, busy: bool) -> bool:
        """Tell whether the workload is done and the time to linger is up; nothing may be left half done."""
        if busy or not self._feed.exhausted:
            return False
        if self._end is None:
            self._end = now + self._linger_s
        return now >= self._end

    def _is_due(self, now: float) -> bool:
        """Tell whether an idle engine has to step once more, for elastic memory."""
        wake_at = self._policy.wake_at
        return wake_at is not None and now >= wake_at

    def _rest(self, now: float) -> None:
        """Sleep until a publication, the next arrival or the end of the run."""
        if not self._told_idle:
            self._told_idle = True
            self._subscription.refresh(self._policy.report, idle=True)
        moments = (self._feed.next_due() or self._end, self._policy.wake_at, now + _LOOK_UP_S)
        self._subscription.wait(min(moment for moment in moments if moment is not None))
