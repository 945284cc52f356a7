"""The processes of this user, as far as /proc shows them: which look like engines, and which ledgers they have open."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvcached.ledger.directory import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_TITLES = ("VLLM::", "sglang::")
_SERVERS = ("vllm", "sglang")
_MODULES = ("vllm.entrypoints.", "sglang.launch_server", "kvcached.rig")
_PYTHON = re.compile(r"python[0-9.]*$")
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")

_LEDGER = re.compile(rf"(/.*/[^/]+{re.escape(SUFFIX)})( \(deleted\))?$", re.DOTALL)
_INODE_FIELD = 4


@dataclass(frozen=True)
class HeldLedger:
    """A ledger file that a process has open or mapped; ``path`` is as that process sees it.

    ``device`` is None where it could not be learned: the number in /proc/PID/maps is another one than stat tells on
    some file systems (btrfs, overlayfs), and proves nothing.
    """

    path: str
    inode: int
    device: int | None
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
    def executable(self) -> str:
        """The path of its program as it sees it; empty where one may not look."""
        try:
            return os.readlink(f"/proc/{self.pid}/exe")
        except OSError:
            return ""

    @cached_property
    def environ(self) -> Mapping[str, str]:
        """The environment that it was started with."""
        pairs = (part.decode(errors="replace").partition("=") for part in _read(self.pid, "environ").split(b"\0"))
        return {name: value for name, _, value in pairs if name}

    @cached_property
    def ledgers(self) -> list[HeldLedger]:
        """The ledger files that it has open or, where none of its descriptors may be seen, mapped."""
        return _held(self.pid, "fd") or _held(self.pid, "map_files") or _mapped(self.pid)

    @property
    def looks_like_engine(self) -> bool:
        """Whether this process is a serving engine, by its title or by the program that it runs.

        An engine's command line as the argument of another program (ssh, docker, an editor, grep) is none.
        """
        return is_engine_command(self.arguments)

    @property
    def age_s(self) -> float:
        """How long it has been running, in seconds."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.started)


def is_engine_command(arguments: Sequence[str]) -> bool:
    """Return whether a command line is one that serves."""
    if not arguments:
        return False
    if arguments[0].startswith(_TITLES):
        return True
    program, rest = arguments[0], list(arguments[1:])
    if _PYTHON.match(os.path.basename(program)):
        program, rest = _run_by_python(rest)
        if program.startswith(_MODULES):
            return True
    if "/vllm/entrypoints/" in program or program.endswith("/sglang/launch_server.py"):
        return True
    return os.path.basename(program) in _SERVERS and rest[:1] == ["serve"]


def _run_by_python(rest: list[str]) -> tuple[str, list[str]]:
    """Return the module or script that an interpreter runs, and its arguments; empty for code on the command line."""
    while rest:
        option = rest.pop(0)
        if not option.startswith("-"):
            return option, rest
        if option == "-m":
            return (rest[0], rest[1:]) if rest else ("", [])
        if option == "-c":
            break
        if option in _OPTIONS_WITH_VALUE:
            del rest[:1]
    return "", []


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


def _held(pid: int, folder: str) -> list[HeldLedger]:
    """Return the ledgers among the links of a folder of /proc. Each leads to the file itself, whatever its name is."""
    found = {}
    try:
        names = os.listdir(f"/proc/{pid}/{folder}")
    except OSError:
        return []
    for name in names:
        link = f"/proc/{pid}/{folder}/{name}"
        with suppress(OSError):  # it was closed meanwhile, or one may not look
            match = _LEDGER.match(os.readlink(link))
            if match is not None:
                status = os.stat(link)
                held = HeldLedger(match[1], status.st_ino, status.st_dev, status.st_nlink == 0)
                found[held.device, held.inode] = held
    return list(found.values())


def _mapped(pid: int) -> list[HeldLedger]:
    found = {}
    for line in _read(pid, "maps").decode(errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        match = _LEDGER.match(fields[-1])
        if match is not None:
            inode = int(fields[_INODE_FIELD])
            found[inode] = HeldLedger(match[1], inode, None, bool(match[2]))
    return list(found.values())
