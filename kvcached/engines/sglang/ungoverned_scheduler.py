"""What happens when this SGLang cannot be governed: it serves as if the plugin were not there, and says so."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from kvcached.engines.sglang import hook_places
from kvcached.engines.sglang.attaching import attach
from kvcached.engines.sglang.identity import identify
from kvcached.engines.sglang.placement import guess_placement, name_members
from kvcached.guards import call_guarded, log_fault
from kvcached.ledger.subscription import Subscription
from kvcached.values import UNLIMITED, unsupported_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.engines.sglang.placement import Placement
    from kvcached.settings import Settings
    from kvcached.values import Identity

UNGOVERNED = "%s; serving continues with a prefix cache that kvcached does not control"
"""What a process says that is left alone, as the log's format of a reason."""

_log = logging.getLogger(__name__)


def refuse_or_warn(settings: Settings, reason: str) -> None:
    """Say once that nothing is governed here; with ``KVCACHED_STRICT=1`` raise ``SystemExit`` instead."""
    if settings.strict:
        message = f"kvcached: {reason}; KVCACHED_STRICT=1 forbids serving without control"
        raise SystemExit(message)
    _log.error(UNGOVERNED, reason)


def report_missing(settings: Settings, reason: str) -> None:
    """Report an SGLang without some hook target, from any of its processes.

    With ``KVCACHED_STRICT=1`` every process refuses. Otherwise a process that builds a scheduler reports it then,
    however it was started: its ranks are known by that time.
    """
    if settings.strict:
        refuse_or_warn(settings, reason)
    try:
        attach(f"{hook_places.SCHEDULER}.__init__", functools.partial(_report_built, settings, reason), before=False)
    except (ImportError, AttributeError):
        refuse_or_warn(settings, reason)  # not even a scheduler of that name: nobody could say it later


def _report_built(settings: Settings, reason: str, _none: object, scheduler: Any, *_: object, **__: object) -> None:  # noqa: ANN401
    unreported = log_fault(_log.error, "%s; and that could not be reported in the ledger", reason)
    call_guarded(unreported, report_scheduler, settings, reason, scheduler)


def report_scheduler(settings: Settings, reason: str, scheduler: Any) -> None:  # noqa: ANN401 - SGLang's scheduler
    """Report, from the process of ``scheduler``, that it cannot be governed.

    The first rank of a replica says so and takes a slot, whose outcome is ``unsupported_engine``; with
    ``KVCACHED_STRICT=1`` every rank refuses.
    """
    placement = guess_placement(scheduler)
    if not placement.is_source and not settings.strict:
        return
    refuse_or_warn(settings, reason)
    identity = identify(settings, placement, startup_limit_tokens=UNLIMITED, block_tokens=1)
    UngovernedSlot(settings, identity, _members(settings, placement, scheduler), reason).open()


def _members(settings: Settings, placement: Placement, scheduler: Any) -> tuple[str, ...]:  # noqa: ANN401
    def plain_names(_error: Exception) -> tuple[str, ...]:  # a slot under one is better than none
        return tuple(f"cpu-{index}" for index in placement.gpu_indices)

    return call_guarded(plain_names, lambda: name_members(placement, settings.gpu_ids, scheduler.server_args.device))


class UngovernedSlot:
    """A slot in the ledgers that refuses whatever is published to it."""

    def __init__(self, settings: Settings, identity: Identity, members: Sequence[str], reason: str) -> None:
        """Prepare the slot; ``reason`` is what publishers are told."""
        self._reason = reason
        self._subscription = Subscription(identity, members, settings.ledger_dir, on_publication=self._refuse)
        self._subscription.acknowledge(unsupported_report(reason))  # nobody sees the slot without it

    def open(self) -> None:
        """Register, or wait for the name to become free."""
        self._subscription.start(patient=True)
        self._refuse()

    def _refuse(self) -> None:
        update = self._subscription.poll()
        settled = 0 if update is None else update.revision
        self._subscription.acknowledge(unsupported_report(self._reason, settled))
