"""A vLLM plugin of the tests: keeps two batches in flight, as asynchronous scheduling does on a GPU."""

from __future__ import annotations

from vllm.config import VllmConfig


def register() -> None:
    """Let the engine core use its batch queue; the CPU platform switches asynchronous scheduling itself off."""
    VllmConfig.max_concurrent_batches = property(lambda _: 2)
