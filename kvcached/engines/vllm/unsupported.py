"""An engine that cannot be controlled says so where an operator looks: once in its log, and in its ledger slot."""

from __future__ import annotations

import logging
import multiprocessing.util
from typing import TYPE_CHECKING, Any

from kvcached.engines.vllm.process import engine_core_settings, holds_engine_core, replica_by_name
from kvcached.subscription import Subscription
from kvcached.values import UNLIMITED, Identity, unsupported_report

if TYPE_CHECKING:
    from kvcached.settings import Settings

_log = logging.getLogger(__name__)

_subscriptions: list[Subscription] = []
"""Keeps the slots of uncontrolled engines alive as long as the process lives."""


class _Announcement:
    """The reason, kept for children: a forked engine core does not load its plugins again."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def make(self) -> None:
        """Say the reason if this process is to hold an engine core."""
        if not holds_engine_core() or _subscriptions:
            return
        settings = engine_core_settings()
        replica = replica_by_name()
        members = settings.gpu_ids or (f"cpu-{replica}",)
        _register(settings, _identity(settings, replica, version="unknown"), members, self.reason)


_announcements: list[_Announcement] = []


def announce(reason: str) -> None:
    """Make this process, or those forked from it, say ``reason`` if it is an engine core. Nothing is hooked then."""
    if _announcements:
        return
    announcement = _Announcement(reason)
    _announcements.append(announcement)
    announcement.make()
    multiprocessing.util.register_after_fork(announcement, _Announcement.make)


def register_unsupported(settings: Settings, engine: Any, version: str, reason: str) -> None:  # noqa: ANN401 - vLLM's EngineCore
    """Register ``engine`` as one that applies nothing, for ``reason``."""
    replica = int(getattr(engine, "engine_index", 0))
    members = settings.gpu_ids or (f"cpu-{replica}",)
    _register(settings, _identity(settings, replica, version), members, reason)


def report_failure(engine: Any, reason: str) -> None:  # noqa: ANN401
    """Let the slot of an engine core whose control ended show ``reason``; never raises."""
    subscription = engine.__dict__.get("_kvcached_subscription")
    if subscription is None:
        return
    try:
        subscription.acknowledge(unsupported_report(reason))
    except Exception:  # noqa: BLE001 - the last resort of a plugin that failed already
        _log.warning("the ledger slot could not be told either", exc_info=True)


def _identity(settings: Settings, replica: int, version: str) -> Identity:
    return Identity(
        instance_name=settings.instance_name,
        engine="vllm",
        engine_version=version,
        replica=replica,
        tp_size=1,
        pp_size=1,
        startup_limit_tokens=UNLIMITED,
        block_tokens=1,
    )


def _register(settings: Settings, identity: Identity, members: tuple[str, ...], reason: str) -> None:
    _log.warning("this vLLM engine serves without run-time control by kvcached: %s", reason)
    subscription = Subscription(identity, members, settings.ledger_dir)
    subscription.start(patient=True)
    subscription.acknowledge(unsupported_report(reason))
    _subscriptions.append(subscription)
