"""Starts processes from a fork of one that has the modules loaded: the same code without 0.1 s (torch: 2 s) of imports.

What a start itself does is for the tests that start an interpreter: ``tests/control/test_start_up.py``, the soak, and
whatever sets a variable that an interpreter reads before it runs anything (``_READ_AT_START``).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ENGINE = Path(__file__).parent / "toy_engine.py"
_SERVER = Path(__file__).parent / "fork_server.py"

_LIGHT = (
    "kvcached.control.__main__",
    "toy_engine",
    "history.actors",
    "kvcached.control.commands.command_line",
)
_WITH_TORCH = ("kvcached.rig.__main__", "kvcached.rig.group", "kvcached.rig.run_report")
"""What the two servers import: first what can be asked for, then what that imports only when it is needed."""

_PROGRAMS = {
    ("-m", "kvcached.control"): ("kvcached.control.__main__", _LIGHT),
    (str(ENGINE),): ("toy_engine", _LIGHT),
    ("-m", "history.run"): ("history.actors", _LIGHT),
    ("-m", "kvcached.rig"): ("kvcached.rig.__main__", _WITH_TORCH),
}

_READ_AT_START = ("PYTHON", "TZ", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_", "OMP_", "KMP_")
"""How the names of variables begin that an interpreter or a library reads when it is loaded."""

Stream = IO[str] | int | None
"""As for :class:`subprocess.Popen`: a file, a descriptor, ``PIPE``, ``DEVNULL``, ``STDOUT``; None is the test's own."""


class ForkedProcess:
    """A process of a fork server; it answers as :class:`subprocess.Popen` with ``text=True`` does."""

    def __init__(self, args: list[str], report: int, streams: list[IO[str] | None]) -> None:
        """Wait for the process id on ``report``, which is closed here when the process has ended."""
        self.args = args
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self._report = os.fdopen(report)
        line = self._report.readline()
        assert line, "the fork server has ended; what it said is among the errors of the tests"
        self.pid = int(line)

    def poll(self) -> int | None:
        """Return how the process ended, or None while it runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises :exc:`subprocess.TimeoutExpired` after ``timeout`` seconds."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Read both outputs to their end and wait; the process is killed where that takes ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None:
            self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(_read, stream) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
                texts = [read.result(None if deadline is None else deadline - time.monotonic()) for read in reads]
            except BaseException:
                self.kill()
                raise
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout)[0]:
            line = self._report.readline()
            self._report.close()
            assert line, f"the fork server ended before process {self.pid} did"
            self.returncode = int(line)
        return self.returncode


class ForkServer:
    """The test's end of a server."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        """Start a server that imports ``modules``."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._read_at_start = _read_at_start(os.environ)
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER), str(theirs.fileno()), *modules],
            env={"OMP_NUM_THREADS": "1", **os.environ},  # as the rig does before it loads torch
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def can_start(self, environment: dict[str, str]) -> bool:
        """Tell whether an interpreter started in ``environment`` would begin as the server did."""
        return _read_at_start(environment) == self._read_at_start

    def start(self, module: str, arguments: list[str], environment: dict[str, str], descriptors: list[int]) -> None:
        """Ask for a process that runs ``module``; the descriptors stay the caller's to close."""
        request = {"module": module, "arguments": arguments, "environment": environment, "directory": os.getcwd()}
        socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)

    def close(self) -> None:
        """End the server."""
        self._channel.close()
        self._process.wait()


Process = ForkedProcess | subprocess.Popen[str]
"""What :func:`popen` returns; both answer alike."""


def popen(
    command: list[str],
    *,
    environment: dict[str, str] | None = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
) -> Process:
    """Start a program of ours from a fork; an interpreter where the environment asks for one."""
    environment = dict(os.environ) if environment is None else environment
    for words, (module, modules) in _PROGRAMS.items():
        begin = [sys.executable, *words]
        if command[: len(begin)] == begin and (server := _server(modules)).can_start(environment):
            return _start(server, command, module, len(begin), environment, (stdin, stdout, stderr))
    return subprocess.Popen(command, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, text=True)


def close_servers() -> None:
    """End all servers of this process."""
    for server in _servers.values():
        server.close()
    _servers.clear()


_servers: dict[tuple[str, ...], ForkServer] = {}


def _server(modules: tuple[str, ...]) -> ForkServer:
    if modules not in _servers:
        _servers[modules] = ForkServer(modules)
    return _servers[modules]


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}
    if found.get("PYTHONWARNINGS") == "error":
        del found["PYTHONWARNINGS"]  # the server's children see to this one themselves
    return found


def _start(
    server: ForkServer,
    command: list[str],
    module: str,
    words: int,
    environment: dict[str, str],
    streams: tuple[Stream, Stream, Stream],
) -> ForkedProcess:
    report, told = os.pipe()
    theirs: list[int] = []
    ours: list[IO[str] | None] = []
    made = [told]
    for number, stream in enumerate(streams):
        descriptor, end, is_made = _open(number, stream, theirs)
        theirs.append(descriptor)
        ours.append(end)
        made += [descriptor] if is_made else []
    try:
        server.start(module, command[words:], environment, [*theirs, told])
    finally:
        for descriptor in made:
            os.close(descriptor)
    return ForkedProcess(command, report, ours)


def _open(number: int, stream: Stream, earlier: list[int]) -> tuple[int, IO[str] | None, bool]:
    """Return the process's descriptor ``number``, the test's end of a pipe, and whether the former is to be closed."""
    if stream == subprocess.PIPE:
        reading, writing = os.pipe()
        if number == 0:
            return reading, os.fdopen(writing, "w"), True
        return writing, os.fdopen(reading), True
    if stream == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None, True
    if stream == subprocess.STDOUT:
        return earlier[1], None, False
    if stream is None:
        return number, None, False
    return (stream if isinstance(stream, int) else stream.fileno()), None, False


def _read(stream: IO[str] | None) -> str | None:
    if stream is None or stream.closed:
        return None
    with stream:
        return stream.read()
