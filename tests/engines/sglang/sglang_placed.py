"""Hooks that took their place in the stand-in of a scheduler with a real prefix cache; no server, no engine loop."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import zmq
from sglang.utils import TypeBasedDispatcher
from torch.distributed import HashStore

from kvcached.engines.sglang.agreement import RankAgreement
from kvcached.engines.sglang.placement import read_placement
from kvcached.engines.sglang.rank_messages import Startup, dialect
from kvcached.engines.sglang.scheduler_hooks import SchedulerHooks
from kvcached.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_caches import Cached

INSTANCE = "placed"
LONGEST = 1000
"""Tokens of the longest request that the stand-in of a scheduler takes."""
NO_TENSORS = "the tensors of _NoPool are not known"
"""Why these pools return no memory: they have none."""


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


def scheduler_of(cached: Cached, *, source: bool = True, sleeps: bool = False) -> SimpleNamespace:
    """Return the stand-in of the scheduler of the first (or second) of two tensor-parallel ranks."""
    rank = 0 if source else 1
    sizes = {"tp_size": 2, "attn_tp_size": 2, "attn_cp_size": 1, "attn_dp_size": 1, "pp_size": 1}
    ranks = {"tp_rank": rank, "attn_tp_rank": rank, "attn_cp_rank": 0, "attn_dp_rank": 0, "pp_rank": 0}
    return SimpleNamespace(
        ps=SimpleNamespace(**sizes, **ranks, dp_rank=None, gpu_id=rank),
        server_args=SimpleNamespace(nnodes=1, base_gpu_id=0, gpu_id_step=1, device="cpu"),
        tree_cache=cached.tree_cache,
        token_to_kv_pool_allocator=cached.token_to_kv_pool_allocator,
        invariant_checker=SimpleNamespace(max_total_num_tokens=cached.size),
        pool_stats_observer=SimpleNamespace(max_total_num_tokens=cached.size),
        max_req_len=LONGEST,
        chunked_req=None,
        idle_sleeper=SimpleNamespace(poller=zmq.Poller()) if sleeps else None,
        _request_dispatcher=TypeBasedDispatcher([]),
    )


def place(
    cached: Cached,
    ledger_dir: Path,
    *,
    source: bool = True,
    sleeps: bool = False,
    environ: dict[str, str] | None = None,
) -> Placed:
    """Return hooks in a scheduler whose fellow rank has said that it can follow, before any iteration."""
    scheduler = scheduler_of(cached, source=source, sleeps=sleeps)
    store = HashStore()
    declare(scheduler_of(cached, source=not source), store)
    return take_place(scheduler, ledger_dir, store, environ)


def take_place(
    scheduler: SimpleNamespace, ledger_dir: Path, store: HashStore, environ: dict[str, str] | None = None
) -> Placed:
    """Return hooks in ``scheduler``, which shares ``store`` with the other ranks."""
    settings = {"KVCACHED_LEDGER_DIR": str(ledger_dir), "KVCACHED_INSTANCE_NAME": INSTANCE, **(environ or {})}
    hooks = SchedulerHooks(read_settings("sglang", settings), lambda: store)
    hooks.take_place(None, scheduler)
    return Placed(hooks, scheduler)


def declare(scheduler: SimpleNamespace, store: HashStore, refusal: str = "", *, no_cap: str = "") -> RankAgreement:
    """Let the rank of ``scheduler`` say that it can follow, or why it cannot."""
    agreement = RankAgreement(read_placement(scheduler), dialect(), store)
    agreement.declare(refusal, no_cap=no_cap)
    return agreement


def begun(limit: int) -> Startup:
    """Return the first message of a source rank with that startup limit."""
    return Startup(limit, obstacle=NO_TENSORS)


def start_second_rank(placed: Placed, limit: int) -> None:
    """Give a rank that is no source the message that it would have got from one."""
    placed.receive([Startup(limit)])
