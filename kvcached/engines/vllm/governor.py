"""One engine core under control: its ledger subscription, its limit, and the steps at which both meet.

The engine's own thread calls :meth:`Governor.on_step` after each step and :meth:`Governor.on_idle` at each turn of its
idle loop; nothing else touches the pool. (An in-process engine has no such thread while it idles; see ``inproc.py``.)
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.vllm.idle_blocks import IdleBlocks
    from kvcached.policy import RetentionPolicy
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
        policy: RetentionPolicy,
        idle: IdleBlocks,
        *,
        publish_events: Callable[[], None],
        wake: Callable[[], None],
        is_busy: Callable[[], bool] = bool,
        advisor: Advisor | None = None,
    ) -> None:
        """Govern ``idle`` by ``policy``.

        ``publish_events`` sends the KV events that wait for the next step of an engine that may have none; ``wake``
        makes an idle engine turn its loop once more; ``is_busy`` tells that an idle engine has something to do now.
        """
        self._subscription = subscription
        self._policy = policy
        self._idle = idle
        self._publish_events = publish_events
        self._wake = wake
        self._is_busy = is_busy
        self._advisor = advisor
        self._idle_blocks = 0
        self._next_check = time.monotonic() + CHECK_S

    @property
    def draining(self) -> bool:
        """Whether a big drop is still in progress, chunk by chunk."""
        return self._policy.draining

    @property
    def subscription(self) -> StepSubscription:
        """The ledger slot of this engine core."""
        return self._subscription

    @property
    def has_released(self) -> bool:
        """Whether idle blocks came or went since the last step or turn."""
        return self._idle.count != self._idle_blocks

    def on_step(self) -> None:
        """Take an update over, keep to the limit after releases, go on with a drop. Call after every engine step."""
        if self._advance():
            self._subscription.acknowledge(self._policy.report())
        else:
            self._subscription.refresh(self._policy.report)
        if self._advisor is not None:
            self._advisor.tick()

    def on_idle(self) -> None:
        """Do the same for an engine that has no work, and let the world know at once: nothing else will."""
        self._advance()
        self._subscription.acknowledge(self._policy.report())
        self._publish_events()
        if self._advisor is not None:
            self._advisor.tick(idle=True)
        if self._policy.draining:
            self._wake()
        elif time.monotonic() >= self._next_check:
            self._check()

    def detach(self) -> None:
        """Leave the engine to itself: give all methods back, and write nothing more but the slot."""
        try:
            if self._advisor is not None:
                self._advisor.detach()
                self._advisor.close()
        finally:
            self._idle.detach()

    def on_shutdown(self) -> None:
        """Give the ledger slot back, as the engine core is shut down."""
        try:
            if self._advisor is not None:
                self._advisor.close()
        finally:
            self._subscription.close()

    def _advance(self) -> bool:
        """Enforce the limit where something changed; return whether the change is worth an acknowledgement."""
        policy = self._policy
        was_draining = policy.draining
        update = self._subscription.poll()
        if update is not None:
            policy.update(update)
        elif self._idle.count != self._idle_blocks:
            policy.on_release()
        elif was_draining:
            policy.on_step()
        else:
            return False
        self._idle_blocks = self._idle.count
        return update is not None or was_draining is not policy.draining

    def _check(self) -> None:
        """Compare the count with the queue, which costs a walk over it, unless there is something else to do."""
        began = time.monotonic()
        if self._idle.check(self._is_busy):
            taken = time.monotonic() - began
            self._next_check = began + max(CHECK_S, CHECK_SHARE * taken)
