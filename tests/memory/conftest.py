"""Real memory to return: anonymous mappings and the regions in them."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

import pytest

from kvcached.memory.regions import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Mapping:
    """Private anonymous memory, every page of it written."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = size
        self._first = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._first)
        self.fill(0x5A)

    def fill(self, byte: int) -> None:
        ctypes.memset(self.address, byte, self.size)

    def region(self, row_bytes: int, offset: int = 0) -> Region:
        return Region(self.address + offset, row_bytes, (self.size - offset) // row_bytes)

    def close(self) -> None:
        del self._first
        self.memory.close()


@pytest.fixture
def mapped() -> Iterator[Callable[[int], Mapping]]:
    """Make mappings of a size in bytes that are gone after the test."""
    mappings: list[Mapping] = []

    def make(size: int) -> Mapping:
        mappings.append(Mapping(size))
        return mappings[-1]

    yield make
    for mapping in mappings:
        mapping.close()
