"""What a run of the rig is told; the same for all ranks, and nothing else may decide an eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached.settings import Settings

CHUNK_BLOCKS = 4096
"""How many blocks one step evicts at most in a big drop; a few milliseconds of work."""


@dataclass(frozen=True, slots=True)
class RigConfig:
    """The arguments of a run.

    ``fault_evictions`` is how many ordered evictions raise at first: 0 for no fault, None for all of them.
    """

    settings: Settings
    tp_size: int
    pp_size: int
    block_tokens: int
    capacity_tokens: int
    chunk_tokens: int
    step_tokens: int
    speed: float | None
    linger_s: float
    check: bool
    timeline: bool
    fault_evictions: int | None

    @property
    def world_size(self) -> int:
        """How many processes there are: every pipeline stage has its own tensor-parallel ranks."""
        return self.tp_size * self.pp_size

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """One member id per rank, made up where the environment names none."""
        return self.settings.gpu_ids or tuple(f"cpu-{rank}" for rank in range(self.world_size))
