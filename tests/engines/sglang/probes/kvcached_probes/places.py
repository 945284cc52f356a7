"""What the probes share: the scheduler of this process, its rank, and a file to write to."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def folder() -> Path:
    """Return the folder shared with the test."""
    return Path(os.environ["KVCACHED_PROBE_DIR"])


def hook_after(target: str, hook: Callable[..., Any]) -> None:
    """Run ``hook(result, *arguments)`` after ``target``."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.register(target, hook, registry.HookType.AFTER)


def hook_around(target: str, hook: Callable[..., Any]) -> None:
    """Run ``hook(target, *arguments)`` in the place of ``target``."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.register(target, hook, registry.HookType.AROUND)


def when_placed(take: Callable[[Any], None]) -> None:
    """Call ``take(scheduler)`` once the scheduler knows its ranks and has its prefix cache."""

    def after(_result: object, scheduler: Any) -> None:  # noqa: ANN401 - SGLang's scheduler
        take(scheduler)

    hook_after(f"{SCHEDULER}.init_request_dispatcher", after)


def ranks_of(scheduler: Any) -> dict[str, int]:  # noqa: ANN401 - SGLang's scheduler
    """Return replica, pipeline stage and tensor-parallel rank of ``scheduler``."""
    state = getattr(scheduler, "ps", None)
    if state is None:
        state = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    replica = state.attn_dp_rank if state.attn_dp_size > 1 else state.dp_rank
    return {"dp": replica or 0, "pp": state.pp_rank, "tp": state.tp_rank}


class Log:
    """One process's records: the first line says which rank it is."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 - SGLang's scheduler
        self._file = (folder() / f"{os.getpid()}.jsonl").open("w", buffering=1)
        self.write(**ranks_of(scheduler))

    def write(self, **fields: object) -> None:
        """Add a line."""
        self._file.write(json.dumps(fields) + "\n")
