"""What happens when this SGLang cannot be governed: it serves as if the plugin were not there, and says so.

Nothing is hooked then, so what is known of a scheduler process comes from how SGLang spawned it.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
from typing import TYPE_CHECKING, Any

from kvcached.engines.sglang.identity import identify
from kvcached.engines.sglang.placement import Placement, name_members
from kvcached.subscription import Subscription
from kvcached.values import UNLIMITED, unsupported_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.settings import Settings
    from kvcached.values import Identity

_log = logging.getLogger(__name__)


def refuse_or_warn(settings: Settings, reason: str) -> None:
    """Say once that nothing is governed here; with ``KVCACHED_STRICT=1`` raise ``SystemExit`` instead."""
    if settings.strict:
        message = f"kvcached: {reason}; KVCACHED_STRICT=1 forbids to serve like that"
        raise SystemExit(message)
    _log.error("%s; serving on with a prefix cache that kvcached does not govern", reason)


def report_spawned(settings: Settings, reason: str) -> None:
    """Report an SGLang without some hook target, from any of its processes.

    Only the first rank of a replica says so and takes a slot, whose outcome is ``unsupported_engine``; with
    ``KVCACHED_STRICT=1`` every process refuses.
    """
    spawned = _spawned_placement()
    if settings.strict:
        refuse_or_warn(settings, reason)
    if spawned is not None and spawned[0].is_source:
        report_placed(settings, reason, *spawned)


def report_placed(settings: Settings, reason: str, placement: Placement, device: str | None) -> None:
    """Report, from a source rank, a replica that cannot be governed."""
    refuse_or_warn(settings, reason)
    identity = identify(settings, placement, startup_limit_tokens=UNLIMITED, block_tokens=1)
    members = name_members(placement, settings.gpu_ids, device)
    UngovernedSlot(settings, identity, members, reason).open()


class UngovernedSlot:
    """A slot in the ledgers that refuses whatever is published to it."""

    def __init__(self, settings: Settings, identity: Identity, members: Sequence[str], reason: str) -> None:
        """Prepare the slot; ``reason`` is what publishers are told."""
        self._reason = reason
        self._subscription = Subscription(identity, members, settings.ledger_dir, on_publication=self._refuse)

    def open(self) -> None:
        """Register, or wait for the name to become free."""
        self._subscription.start(patient=True)
        self._refuse()

    def _refuse(self) -> None:
        update = self._subscription.poll()
        settled = 0 if update is None else update.revision
        self._subscription.acknowledge(unsupported_report(self._reason, settled))


def _spawned_placement() -> tuple[Placement, str | None] | None:
    """Return placement and device of this process if SGLang spawned it as a scheduler, from its spawn arguments."""
    process: Any = multiprocessing.current_process()
    target: Any = getattr(process, "_target", None)
    if getattr(target, "__name__", "") != "run_scheduler_process":
        return None
    try:
        given = inspect.signature(target).bind(*process._args, **process._kwargs).arguments  # noqa: SLF001
        args, tp_rank, pp_rank = given["server_args"], given["tp_rank"], given["pp_rank"]
        placement = Placement(
            replica=given.get("dp_rank") or 0,
            width=args.tp_size,
            pp_rank=pp_rank,
            pp_size=args.pp_size,
            is_source=tp_rank == 0 and pp_rank == 0,
            gpu_indices=tuple(given["gpu_id"] + step * args.gpu_id_step for step in range(args.tp_size)),
            first_gpu_index=args.base_gpu_id,
            gpu_index_step=args.gpu_id_step,
        )
    except (TypeError, KeyError, AttributeError):
        return None  # an SGLang that spawns its schedulers in another way; the log line is all there is
    return placement, args.device
