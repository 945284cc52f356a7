"""What actors write down of their compare-and-swaps."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from kvcached.ledger import binding

if TYPE_CHECKING:
    from kvcached.ledger.contents import AuditRecord
    from kvcached.values import Update

MEMBERS = 8
GPUS = tuple(f"cpu-{index}" for index in range(MEMBERS))


def pair(update: Update) -> list[int]:
    """Return the JSON form of a pair."""
    return [update.revision, update.limit_tokens]


class RecordingHandle(binding.Handle):
    """A ledger handle that writes down each compare-and-swap; ``raises`` is shared by all of a process."""

    raises: list[list[Any]] = []  # noqa: RUF012 - one list per process is what is wanted

    def __init__(self, directory_fd: int, name: str, *, writable: bool) -> None:
        super().__init__(directory_fd, name, writable=writable)
        self.path = os.path.join(os.readlink(f"/proc/self/fd/{directory_fd}"), name)
        self.member = GPUS.index(name.removesuffix(".ledger"))

    def raise_desired(
        self, index: int, incarnation: int, update: Update, record: AuditRecord | None = None, *, floor: int = 0
    ) -> tuple[bool, Update]:
        start = time.monotonic_ns()
        raised, found = super().raise_desired(index, incarnation, update, record, floor=floor)
        end = time.monotonic_ns()
        self.raises.append([start, end, self.member, update.bound.value, pair(update), raised, pair(found)])
        return raised, found
