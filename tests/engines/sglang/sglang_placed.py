"""Hooks that took their place in the stand-in of a scheduler with a real prefix cache; no server, no engine loop."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import zmq
from sglang.utils import TypeBasedDispatcher

from kvcached.engines.sglang.hooks import SchedulerHooks
from kvcached.engines.sglang.replica import Startup
from kvcached.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_caches import Cached

INSTANCE = "placed"


@dataclass
class Placed:
    """Hooks and what they hook, driven as SGLang's loop drives them."""

    hooks: SchedulerHooks
    scheduler: SimpleNamespace

    def iterate(self) -> list[Any]:
        """Run one idle iteration; returns what was broadcast."""
        called = self.hooks.announce(None, [], None)
        messages = called[0][1] if called else []
        self.receive(messages)
        return messages

    def receive(self, messages: list[Any]) -> None:
        """Run one iteration with these messages."""
        for message in messages:
            self.scheduler._request_dispatcher(message)
        self.hooks.end_iteration(None, self.scheduler, messages)


def place(
    cached: Cached,
    ledger_dir: Path,
    *,
    source: bool = True,
    sleeps: bool = False,
    environ: dict[str, str] | None = None,
) -> Placed:
    """Return hooks in the scheduler of the first (or second) of two tensor-parallel ranks, before any iteration."""
    rank = 0 if source else 1
    sizes = {"tp_size": 2, "attn_tp_size": 2, "attn_cp_size": 1, "attn_dp_size": 1, "pp_size": 1}
    ranks = {"tp_rank": rank, "attn_tp_rank": rank, "attn_cp_rank": 0, "attn_dp_rank": 0, "pp_rank": 0}
    scheduler = SimpleNamespace(
        ps=SimpleNamespace(**sizes, **ranks, dp_rank=None, gpu_id=rank),
        server_args=SimpleNamespace(nnodes=1, base_gpu_id=0, gpu_id_step=1, device="cpu"),
        tree_cache=cached.tree_cache,
        token_to_kv_pool_allocator=cached.token_to_kv_pool_allocator,
        idle_sleeper=SimpleNamespace(poller=zmq.Poller()) if sleeps else None,
        _request_dispatcher=TypeBasedDispatcher([]),
    )
    settings = {"KVCACHED_LEDGER_DIR": str(ledger_dir), "KVCACHED_INSTANCE_NAME": INSTANCE, **(environ or {})}
    hooks = SchedulerHooks(read_settings("sglang", settings))
    hooks.take_place(None, scheduler)
    return Placed(hooks, scheduler)


def start_second_rank(placed: Placed, limit: int) -> None:
    """Give a rank that is no source the message that it would have got from one."""
    placed.receive([Startup(limit)])
