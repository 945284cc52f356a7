"""Launches through SGLang's own Ray launcher, as far as the stand-in for Ray lets it."""

from __future__ import annotations

import importlib
import logging
import sys


def main(*more: str) -> None:
    """Launch; with "loading", as if SGLang's actor loaded plugins."""
    logging.basicConfig()
    engine = importlib.import_module("sglang.srt.ray.engine").RayEngine
    if "loading" in more:
        importlib.import_module("sglang.srt.ray.scheduler_actor").SchedulerActor.__init__ = load_first
    importlib.import_module("sglang.srt.plugins").load_plugins()
    engine._launch_scheduler_processes(None, None, None, placement_group=None)


def load_first(_self: object) -> None:
    """Stand in for an actor's constructor that loads plugins first."""
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415 - as SGLang does in its processes

    load_plugins()


if __name__ == "__main__":
    main(*sys.argv[1:])
