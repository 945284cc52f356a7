"""The one broadcast of a step: a message from rank 0 to all ranks of the gloo group.

A step costs one collective of a fixed size, and a second one only where the message does not fit into it; which of the
two it is, all ranks learn from the first. Nothing else in the rig is a collective.
"""

from __future__ import annotations

import pickle
import struct
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from pathlib import Path

FRAME_BYTES = 4096
_HEADER = struct.Struct("=Q")

_FOREVER = timedelta(days=3650)
"""An idle engine rests inside a broadcast, so waiting for one is never an error."""


class Exchange:
    """One rank's end of the group."""

    def __init__(self, rank: int, world_size: int, store: Path) -> None:
        """Join the group that meets in the file ``store``; returns once all ``world_size`` ranks have."""
        self.collectives = 0
        """How many collectives this rank has taken part in."""
        self._frame = bytearray(FRAME_BYTES)
        self._tensor = torch.frombuffer(self._frame, dtype=torch.uint8)
        meeting = f"file://{store}"
        dist.init_process_group("gloo", meeting, timeout=_FOREVER, world_size=world_size, rank=rank)

    def send(self, message: object) -> None:
        """Send ``message``, which has to be picklable, to all other ranks; rank 0 alone calls it."""
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        _HEADER.pack_into(self._frame, 0, len(payload))
        fits = len(payload) <= FRAME_BYTES - _HEADER.size
        if fits:
            self._frame[_HEADER.size : _HEADER.size + len(payload)] = payload
        self._broadcast(self._tensor)
        if not fits:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def receive(self) -> Any:  # noqa: ANN401 - what was sent is what arrives
        """Wait for the next message from rank 0 and return it; for all ranks but 0."""
        self._broadcast(self._tensor)
        (length,) = _HEADER.unpack_from(self._frame)
        if length <= FRAME_BYTES - _HEADER.size:
            return pickle.loads(memoryview(self._frame)[_HEADER.size : _HEADER.size + length])  # noqa: S301 - our own
        payload = bytearray(length)
        self._broadcast(torch.frombuffer(payload, dtype=torch.uint8))
        return pickle.loads(payload)  # noqa: S301 - from our own rank 0

    def confirm(self) -> None:
        """Wait until all ranks have come here; all of them call it at the same place in the order of messages."""
        self.collectives += 1
        dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self.collectives += 1
        dist.broadcast(tensor, src=0)
