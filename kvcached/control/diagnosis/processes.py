"""The processes of this user, as far as /proc shows them: which look like engines, and which ledgers they have open."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvcached.ledger import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ENGINE = re.compile(
    r"(^|/|\s)vllm serve\b|\bvllm\.entrypoints\.|^VLLM::|\bsglang\.launch_server\b|(^|/|\s)sglang serve\b|^sglang::"
    r"|\bkvcached\.rig\b"
)
_MAPPING = re.compile(rf"(/.*/([^/]+{re.escape(SUFFIX)}))( \(deleted\))?$")
_INODE_FIELD = 4


@dataclass(frozen=True)
class MappedLedger:
    """A ledger file that a process has mapped."""

    path: str
    inode: int
    deleted: bool


class Process:
    """One process; what may not be read of it is empty."""

    def __init__(self, pid: int, parent: int, uid: int, started: float) -> None:
        self.pid = pid
        self.parent = parent
        self.uid = uid
        self.started = started

    @cached_property
    def arguments(self) -> list[str]:
        """The command line, which a process may have replaced by a title."""
        return [part.decode(errors="replace") for part in _read(self.pid, "cmdline").split(b"\0") if part]

    @cached_property
    def environ(self) -> Mapping[str, str]:
        """The environment that it was started with."""
        pairs = (part.decode(errors="replace").partition("=") for part in _read(self.pid, "environ").split(b"\0"))
        return {name: value for name, _, value in pairs if name}

    @cached_property
    def ledgers(self) -> list[MappedLedger]:
        """The ledger files that it has mapped."""
        found = {}
        for line in _read(self.pid, "maps").decode(errors="replace").splitlines():
            match = _MAPPING.search(line)
            if match is not None:
                inode = int(line.split(maxsplit=5)[_INODE_FIELD])
                found[inode] = MappedLedger(match[1], inode, bool(match[3]))
        return list(found.values())

    @property
    def looks_like_engine(self) -> bool:
        """Whether the command line or title is one of a serving engine."""
        return _ENGINE.search(" ".join(self.arguments)) is not None

    @property
    def age_s(self) -> float:
        """How long it has been running, in seconds."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.started)


def own_processes() -> dict[int, Process]:
    """Return the processes of this user by pid."""
    found = {}
    for name in os.listdir("/proc"):
        process = _process(int(name)) if name.isdecimal() else None
        if process is not None and process.uid == os.geteuid():
            found[process.pid] = process
    return found


def engine_roots(processes: Mapping[int, Process]) -> list[Process]:
    """Return the processes that look like engines and are not children of another such process."""
    engines = [process for process in processes.values() if process.looks_like_engine]
    return [process for process in engines if not any(up.looks_like_engine for up in _ancestors(process, processes))]


def family(root: Process, processes: Mapping[int, Process]) -> list[Process]:
    """Return a process and all that descend from it."""
    return [root, *(process for process in processes.values() if root in _ancestors(process, processes))]


def _ancestors(process: Process, processes: Mapping[int, Process]) -> Iterator[Process]:
    parent = processes.get(process.parent)
    while parent is not None:
        yield parent
        parent = processes.get(parent.parent)


def _process(pid: int) -> Process | None:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    status = _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    if not status or status[0] == "Z":
        return None
    return Process(pid, int(status[1]), uid, int(status[19]) / os.sysconf("SC_CLK_TCK"))


def _read(pid: int, name: str) -> bytes:
    """Return a file of /proc; empty where one may not look, or the process has gone."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
