"""Looks at instances with a page whose curve is simple, as values."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvcached.advisor.page import Page, PageWindow
from kvcached.balance.engine_look import InstanceLook, ReplicaLook
from kvcached.values import Bound, Outcome

if TYPE_CHECKING:
    from kvcached.balance.engine_look import PublishedBy

LIMITS = (1_000, 10_000, 100_000)


def page_of(requests: int) -> Page:
    """Return a page of prompts of 4,000 tokens, half of which hit in 100,000 tokens of cache."""
    prompt = requests * 4_000.0
    buckets = (0.0, prompt / 6, prompt / 6, prompt / 6, 0.0)[: len(LIMITS) + 1]
    window = PageWindow(4e6, max(prompt, 1.0), prompt / 4, prompt / 4, buckets)
    return Page(
        incarnation=1,
        updated_ns=time.time_ns(),
        observed_tokens=requests * 4_000,
        requests=requests,
        limit_tokens=10_000,
        capacity_tokens=200_000,
        in_use_mean=1_000.0,
        in_use_high=2_000.0,
        block_tokens=16,
        state=0,
        failures=0,
        note="",
        limits=LIMITS,
        windows=(window, window),
    )


def instance_look(
    name: str,
    *,
    limit: int = 20_000,
    startup: int = 20_000,
    revision: int = 0,
    incarnation: str = "first",
    requests: int = 500,
    page: bool = True,
    cap: bool = False,
    published_by: PublishedBy | None = None,
) -> InstanceLook:
    """Return an instance of one replica with blocks of 16 tokens and a pool of 200,000."""
    replica = ReplicaLook(
        published_tokens=limit,
        applied_tokens=limit,
        used_tokens=limit,
        active_tokens=500,
        capacity_tokens=200_000,
        startup_tokens=startup,
        block_tokens=16,
        token_bytes=1024,
        resident_bytes=0,
        page=page_of(requests) if page else None,
        page_problem="" if page else "KVCACHED_ADVISOR=0",
    )
    bound = Bound.CAP if cap else Bound.LIMIT
    return InstanceLook(name, incarnation, revision, ("cpu-0",), bound, (replica,), Outcome.APPLIED, "", published_by)
