"""What the kernel says of a process's memory, for tests, pictures and rare reports: never for a hot path.

Reading ``smaps_rollup`` walks all pages of the process: about 20 ms at 2 GB.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcached.memory.regions import Region

CGROUP_ROOT = "/sys/fs/cgroup"


def anonymous_bytes(pid: int | str = "self") -> int:
    """Return the anonymous memory of a process, the part that a KV pool on the CPU is in. Raises OSError."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "Anonymous":
                return int(value.split()[0]) * 1024
    message = f"/proc/{pid}/smaps_rollup has no line 'Anonymous'"
    raise OSError(message)


def minor_faults(pid: int | str = "self") -> int:
    """Return how many page faults a process has had that needed no disk. Raises OSError."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[7])


def cgroup_bytes(pid: int | str = "self") -> int | None:
    """Return the usage of the memory cgroup of a process, version 1 or 2; None where there is none to be seen."""
    with open(f"/proc/{pid}/cgroup", encoding="ascii", errors="replace") as lines:
        entries = [line.rstrip("\n").split(":", 2) for line in lines]
    for hierarchy, controllers, path in entries:
        if "memory" in controllers.split(","):
            usage = _read_number(f"{CGROUP_ROOT}/memory{path}/memory.usage_in_bytes")
            # In a container the path is the host's, and the container's own group is what is mounted.
            return usage if usage is not None else _read_number(f"{CGROUP_ROOT}/memory/memory.usage_in_bytes")
        if hierarchy == "0":
            usage = _read_number(f"{CGROUP_ROOT}{path}/memory.current")
            if usage is not None:
                return usage
    return None


def resident_bytes(regions: Iterable[Region]) -> int:
    """Return how many bytes of this process's ``regions`` hold memory, counted in whole pages by ``mincore``."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = 0
    for region in regions:
        start = region.address - region.address % mmap.PAGESIZE
        stop = region.address + region.rows * region.row_bytes
        vector = (ctypes.c_ubyte * -(-(stop - start) // mmap.PAGESIZE))()
        if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), vector) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        pages += sum(1 for page in vector if page & 1)
    return pages * mmap.PAGESIZE


def _read_number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
