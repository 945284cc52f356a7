"""Imports what many processes of the tests need, once, and becomes one of them each time it is asked.

``python tests/support/fork_server.py CHANNEL MODULE...`` imports the modules and then serves the socket with the
descriptor CHANNEL. A request is a JSON object (see :class:`support.forked.ForkServer`) with four descriptors: standard
input, output and error of the new process, and a pipe that is told its process id and then how it ended. The new
process calls the ``main`` of a module as ``python -m MODULE`` would; it ends as an interpreter ends, not in the server.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import socket
import sys
import warnings
from typing import Any

LARGEST_REQUEST = 1 << 18
"""In bytes; most of it is the environment."""

MOST_DESCRIPTORS = 1 << 16
"""In bytes; most of it is the environment."""

MOST_DESCRIPTORS = 1 << 16


class Server:
    """The process that is forked. It has one thread, no handler of a signal and no open ledger."""

    def __init__(self, channel: int) -> None:
        """Serve the socket with the descriptor ``channel``."""
        self._channel = channel
        self._reports: dict[int, tuple[int, int]] = {}
        """The process id and the pipe of each child, by the child's own descriptor."""
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    def serve(self) -> dict[str, Any] | None:
        """Fork once for each request; return the request in the child, and None once nobody can ask any more."""
        while True:
            for ready, _ in self._poll.poll():
                if ready != self._channel:
                    self._report_end(ready)
                    continue
                request, descriptors = self._receive()
                if request is None:
                    return None
                child = os.fork()
                if child == 0:
                    adopt(descriptors[:3])
                    return request
                self._watch(child, descriptors)

    def _receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        channel = socket.socket(fileno=self._channel)
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, LARGEST_REQUEST, 4)
        finally:
            channel.detach()
        return (json.loads(message) if message else None), descriptors

    def _watch(self, child: int, descriptors: list[int]) -> None:
        *streams, report = descriptors
        for stream in streams:
            os.close(stream)
        self._tell(report, child)
        handle = os.pidfd_open(child)
        self._reports[handle] = child, report
        self._poll.register(handle, select.POLLIN)

    def _report_end(self, handle: int) -> None:
        child, report = self._reports.pop(handle)
        self._poll.unregister(handle)
        _, status = os.waitpid(child, 0)
        self._tell(report, os.waitstatus_to_exitcode(status))
        os.close(report)
        os.close(handle)

    @staticmethod
    def _tell(report: int, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # a test that has ended does not wait for its processes
            os.write(report, f"{number}\n".encode())


def adopt(streams: list[int]) -> None:
    """Make ``streams`` this process's standard input, output and error, and keep nothing else open."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, MOST_DESCRIPTORS)
    # The old objects remember what kind of file they were opened on.
    sys.stdin = sys.__stdin__ = _stream(0, "r")
    sys.stdout = sys.__stdout__ = _stream(1, "w")
    sys.stderr = sys.__stderr__ = _stream(2, "w", buffering=1, errors="backslashreplace")


def _stream(number: int, mode: str, buffering: int = -1, errors: str | None = None) -> Any:  # noqa: ANN401 - as open
    return open(number, mode, buffering, errors=errors, closefd=False)


def become(request: dict[str, Any]) -> None:
    """Take over what a process gets from the one that starts it, and run the module that was asked for."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.path[0] = request["directory"]
    if os.environ.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    module = sys.modules["__main__"] = sys.modules[request["module"]]  # a publication is signed with the program's name
    sys.argv = [str(module.__file__), *request["arguments"]]
    sys.exit(module.main())


def main() -> None:
    """Serve until the other end of the channel is closed."""
    sys.path.insert(1, os.path.dirname(sys.path[0]))  # the folder of all tests
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection in each child copies all of it
    request = Server(int(sys.argv[1])).serve()
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()
