"""A vLLM plugin of the tests: the first worker of an engine core is one of a node where the plugin is not installed."""

from __future__ import annotations

import multiprocessing
import sys

from kvcached.engines.vllm import register as register_kvcached


def register() -> None:
    """Let that worker not import what an engine core may ask it by name."""
    register_kvcached()
    if multiprocessing.current_process().name == "VllmWorker-0":
        for name in ("engines.vllm.devices", "engines.vllm.kv_tensors", "memory.madvise"):
            sys.modules[f"kvcached.{name}"] = None  # type: ignore[assignment] - so Python refuses an import
