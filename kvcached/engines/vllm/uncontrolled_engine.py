"""An engine that cannot be controlled says so where an operator looks: once in its log, and in its ledger slot."""

from __future__ import annotations

import logging
import multiprocessing.util
from typing import TYPE_CHECKING, Any

from kvcached.engines.vllm.process import engine_core_settings, holds_engine_core, replica_by_name, replica_of
from kvcached.engines.vllm.slot import take_slot
from kvcached.guards import call_guarded, log_fault
from kvcached.values import UNLIMITED, Identity, unsupported_report

if TYPE_CHECKING:
    from kvcached.ledger.subscription import Subscription
    from kvcached.settings import Settings

_log = logging.getLogger(__name__)

NO_SLOT = "this engine serves without run-time control, and has no ledger slot to say so"

_subscriptions: list[Subscription] = []
"""Keeps the slot of a process whose vLLM cannot be controlled at all alive as long as the process lives."""


class _Announcement:
    """The reason, kept for children: a forked engine core does not load its plugins again."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def make(self) -> None:
        """Say the reason if this process is to hold an engine core."""
        if not holds_engine_core() or _subscriptions:
            return
        settings = engine_core_settings()
        unsaid = log_fault(_log.warning, NO_SLOT)
        subscription = call_guarded(unsaid, _take_slot, settings, replica_by_name(), "unknown", self.reason)
        if subscription is not None:
            _subscriptions.append(subscription)


_announcements: list[_Announcement] = []


class Uncontrolled:
    """Stands where the governor of an engine core would, once that core is left alone."""

    def __init__(self, subscription: Subscription | None = None) -> None:
        """Keep the slot that says so, if there is one, for as long as the engine lives."""
        self._subscription = subscription

    def on_step(self) -> None:
        """Do nothing."""

    def on_idle(self) -> None:
        """Do nothing."""

    def on_shutdown(self) -> None:
        """Give the ledger slot back, as the engine core is shut down."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None


def announce(reason: str) -> None:
    """Make this process, or those forked from it, say ``reason`` if it is an engine core. Nothing is hooked then."""
    if _announcements:
        return
    announcement = _Announcement(reason)
    _announcements.append(announcement)
    announcement.make()
    multiprocessing.util.register_after_fork(announcement, _Announcement.make)


def leave_alone(settings: Settings, engine: Any, version: str, reason: str) -> Uncontrolled:  # noqa: ANN401 - vLLM's EngineCore
    """Register ``engine`` as one that applies nothing, for ``reason``; never raises."""
    unsaid = log_fault(_log.warning, NO_SLOT)
    return Uncontrolled(call_guarded(unsaid, lambda: _take_slot(settings, replica_of(engine), version, reason)))


def report_failure(subscription: Subscription | None, reason: str) -> Uncontrolled:
    """Let the slot of an engine core whose control ended show ``reason``, until it shuts down; never raises."""
    if subscription is None:
        return Uncontrolled()
    unsaid = log_fault(_log.warning, "and the ledger slot could not be updated")
    call_guarded(unsaid, subscription.acknowledge, unsupported_report(reason))
    return Uncontrolled(subscription)


def _take_slot(settings: Settings, replica: int, version: str, reason: str) -> Subscription:
    _log.warning("this vLLM engine serves without run-time control by kvcached: %s", reason)
    identity = Identity(
        instance_name=settings.instance_name,
        engine="vllm",
        engine_version=version,
        replica=replica,
        tp_size=1,
        pp_size=1,
        startup_limit_tokens=UNLIMITED,
        block_tokens=1,
    )
    members = settings.gpu_ids or (f"cpu-{replica}",)
    subscription, _ = take_slot(identity, members, settings, first=unsupported_report(reason))
    return subscription
