"""What a pool's memory is doing, in bytes over all ranks."""

from __future__ import annotations

from typing import NamedTuple

RETURNS = "yes"


class MemoryFigures(NamedTuple):
    """How much of a KV pool holds memory; all figures count all ranks of the replica."""

    pool_bytes: int
    returned_bytes: int
    """Back with the operating system now."""
    returns: str
    """``yes``, or why memory is not returned."""

    @property
    def resident_bytes(self) -> int:
        """What is not returned."""
        return self.pool_bytes - self.returned_bytes
