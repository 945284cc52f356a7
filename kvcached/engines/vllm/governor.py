"""One engine core under control: its ledger subscription, its bounds, and the steps at which both meet.

The engine's own thread calls :meth:`Governor.on_step` after each step and :meth:`Governor.on_idle` at each turn of its
idle loop; nothing else touches the pool. (An in-process engine has no such thread while it idles; see ``inproc.py``.)
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.vllm.alarm import Alarm
    from kvcached.engines.vllm.bounded_pool import BoundedPool
    from kvcached.values import Report, Update


CHECK_S = 60.0
"""How long an idle engine's count goes unchecked at least."""

CHECK_SHARE = 1000
"""How many times longer than a check takes it is not repeated: the largest pools are walked less often."""


class StepSubscription(Protocol):
    """The part of ``kvcached.ledger.subscription.Subscription`` used at each step."""

    def poll(self) -> Update | None:
        """Return the newest complete update that is not settled yet."""

    def acknowledge(self, report: Report) -> None:
        """Write the report into the ledger."""

    def refresh(self, report_of: Callable[[], Report]) -> None:
        """Write a report now and then while the engine is busy."""

    def close(self) -> None:
        """Give the slot back."""


class Advisor(Protocol):
    """The part of the advisor that goes with the engine's steps."""

    def tick(self, *, idle: bool = False) -> None:
        """Do what is due after a step; ``idle`` says that there is no work."""

    def detach(self) -> None:
        """Leave the scheduler to itself."""

    def close(self) -> None:
        """Tell the outside nothing more."""


class Governor:
    """Keeps one block pool at its limit. All methods run on the engine's own thread."""

    def __init__(
        self,
        subscription: StepSubscription,
        bounded: BoundedPool,
        alarm: Alarm,
        *,
        publish_events: Callable[[], None],
        wake: Callable[[], None],
        is_busy: Callable[[], bool] = bool,
        advisor: Advisor | None = None,
    ) -> None:
        """Govern ``bounded``.

        ``publish_events`` sends the KV events that wait for the next step of an engine that may have none; ``wake``
        makes an idle engine turn its loop once more, and ``alarm`` does so later; ``is_busy`` tells that an idle engine
        has something to do now.
        """
        self._subscription = subscription
        self._bounded = bounded
        self._policy = bounded.policy
        self._alarm = alarm
        self._publish_events = publish_events
        self._wake = wake
        self._is_busy = is_busy
        self._advisor = advisor
        self._next_check = time.monotonic() + CHECK_S

    @property
    def draining(self) -> bool:
        """Whether a big drop, a cap or the return of memory is still in progress, piece by piece."""
        return self._policy.draining

    @property
    def subscription(self) -> StepSubscription:
        """The ledger slot of this engine core."""
        return self._subscription

    @property
    def has_released(self) -> bool:
        """Whether blocks came or went since the last step or turn, or something is still in progress."""
        return self._bounded.has_released or self._policy.draining

    def on_step(self) -> None:
        """Take an update over, keep to the bounds after releases, go on with a drop. Call after every engine step."""
        self._bounded.transport.may_wait = False
        if self._advance():
            self._subscription.acknowledge(self._policy.report())
        else:
            self._subscription.refresh(self._policy.report)
        if self._advisor is not None:
            self._advisor.tick()

    def on_idle(self) -> None:
        """Do the same for an engine that has no work, and let the world know at once: nothing else will."""
        self._bounded.transport.may_wait = True
        self._advance()
        self._subscription.acknowledge(self._policy.report())
        self._publish_events()
        if self._advisor is not None:
            self._advisor.tick(idle=True)
        if self._policy.draining:
            self._wake()
            return
        self._alarm.set(self._policy.wake_at)
        if time.monotonic() >= self._next_check:
            self._check()

    def detach(self) -> None:
        """Leave the engine to itself: give all methods back, and write nothing more but the slot."""
        self._alarm.cancel()
        try:
            if self._advisor is not None:
                self._advisor.detach()
                self._advisor.close()
        finally:
            self._bounded.detach()

    def on_shutdown(self) -> None:
        """Give the ledger slot back, as the engine core is shut down."""
        self._alarm.cancel()
        try:
            if self._advisor is not None:
                self._advisor.close()
        finally:
            self._subscription.close()

    def _advance(self) -> bool:
        """Enforce what changed; return whether the change is worth an acknowledgement."""
        policy, bounded = self._policy, self._bounded
        update = self._subscription.poll()
        if update is None and not policy.pending and not bounded.has_released:
            return False
        was_draining = policy.draining
        if update is not None:
            policy.update(update)
        else:
            if bounded.has_released:
                policy.on_release()
            policy.on_step()
        bounded.note_released()
        return update is not None or was_draining is not policy.draining

    def _check(self) -> None:
        """Compare the count with the queue, which costs a walk over it, unless there is something else to do."""
        began = time.monotonic()
        if self._bounded.idle.check(self._is_busy):
            taken = time.monotonic() - began
            self._next_check = began + max(CHECK_S, CHECK_SHARE * taken)
