"""What a run of the rig is told; the same for all ranks, and nothing else may decide an eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached.settings import Settings

TOKEN_BYTES = 4
"""How much KV memory a token takes on each rank, unless told otherwise."""

CHUNK_BLOCKS = 4096
"""How many blocks one step evicts at most in a big drop; a few milliseconds of work."""


@dataclass(frozen=True, slots=True)
class RigConfig:
    """The arguments of a run.

    ``token_bytes`` is the KV memory of one token on one rank, ``longest_tokens`` the length of the longest request
    that is accepted. ``fault_evictions`` is how many ordered evictions raise at first: 0 for no fault, None for all of
    them. ``guards_returned`` forbids every access to returned memory until its block is handed out again.
    """

    settings: Settings
    tp_size: int
    pp_size: int
    block_tokens: int
    capacity_tokens: int
    token_bytes: int
    longest_tokens: int
    chunk_tokens: int
    step_tokens: int
    speed: float | None
    linger_s: float
    check: bool
    timeline: bool
    fault_evictions: int | None
    guards_returned: bool

    @property
    def world_size(self) -> int:
        """How many processes there are: every pipeline stage has its own tensor-parallel ranks."""
        return self.tp_size * self.pp_size

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """One member id per rank, made up where the environment names none."""
        return self.settings.gpu_ids or tuple(f"cpu-{rank}" for rank in range(self.world_size))
