"""Takes the doorbell away from the plugin under test."""

from __future__ import annotations


def install() -> None:
    """Let no scheduler have a doorbell."""
    from kvcached.engines.sglang import scheduler_hooks  # noqa: PLC0415 - only in processes that hold a scheduler

    scheduler_hooks.fit_doorbell = lambda _scheduler: None  # type: ignore[assignment]
