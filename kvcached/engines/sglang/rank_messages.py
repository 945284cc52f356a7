"""What the source rank of a replica tells all ranks, itself included, in front of requests that it broadcasts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvcached.values import UNLIMITED, Update

CHUNK_TOKENS = 8192
"""How many tokens one iteration evicts at most: about 2.5 ms on two slow cores for leaves of 100 tokens."""

CAP_CHUNK_TOKENS = 2048
"""How many tokens one iteration takes out of the pool at most, or puts back: about 1.5 ms on two slow cores."""

EVICTION_RULES = 2
"""Raise it when ranks of this and of the former version would evict or withhold other tokens for the same messages."""


@dataclass(frozen=True, slots=True)
class Startup:
    """The first message from a source rank to its replica: what to start with.

    It travels, though every rank has an environment of its own, because that of another node may differ.
    """

    limit_tokens: int
    cap_tokens: int = UNLIMITED
    no_cap: str = ""
    """Why some rank's pool cannot be capped."""
    obstacle: str = ""
    """Why some rank's memory cannot be returned."""
    elastic_after_s: float | None = None


def dialect() -> str:
    """Return what must be the same on all ranks of a replica: the shape of the messages and what follows from them."""
    shapes = [
        (kind.__module__, kind.__qualname__, [field.name for field in fields(kind)]) for kind in (Startup, Update)
    ]
    return repr((shapes, CHUNK_TOKENS, CAP_CHUNK_TOKENS, EVICTION_RULES))
