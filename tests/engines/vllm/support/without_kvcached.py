"""A vLLM plugin of the tests: the first worker of an engine core is one of a node where the plugin is not installed."""

from __future__ import annotations

import multiprocessing
import sys

from kvcached.engines.vllm import register as register_kvcached


def register() -> None:
    """Let that worker import nothing of the plugin any more."""
    register_kvcached()
    if multiprocessing.current_process().name == "VllmWorker-0":
        for name in ("binding", "devices", "hooks"):
            sys.modules[f"kvcached.engines.vllm.{name}"] = None  # type: ignore[assignment]
