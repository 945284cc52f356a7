"""The launcher's side: starts the ranks, watches them, and leaves none behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.rig.worker import EXIT_PEER_LOST, Done, Ready, Refused, run_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.context import ForkProcess
    from types import FrameType

    from kvcached.rig.config import RigConfig
    from kvcached.workload.request import Arrival

_GRACE_S = 1.0
"""How long the launcher waits for the other ranks' exit codes once one has died, to name the right one."""


class GroupError(RuntimeError):
    """The group ended before its time; the message is one sentence for the user."""


class Group:
    """The processes of one run.

    They are forked from this one after it has loaded torch and before it has any thread, which saves each of them the
    loading. All state of a rank is made in its own process.
    """

    def __init__(self, config: RigConfig, arrivals: Iterable[Arrival], on_ready: Callable[[], None]) -> None:
        """Prepare a run over ``arrivals``; ``on_ready`` is called when rank 0 takes publications."""
        self._config = config
        self._arrivals = arrivals
        self._on_ready = on_ready
        self._processes: list[ForkProcess] = []
        self._pipes: dict[Connection, int] = {}
        self._interrupts = 0

    def run(self) -> list[Done]:
        """Start the ranks, wait for their end and return what each has to say, in order of rank.

        Main thread only, as it takes SIGINT and SIGTERM: the first ends the run after the step at work, the second at
        once. Raises :class:`GroupError`; no process is left in any case.
        """
        # The file in which the ranks meet has no name that could be left behind: the ranks inherit it.
        store = os.memfd_create("kvcached-rig-store", 0)
        try:
            self._start(Path(f"/proc/self/fd/{store}"))
            signal.signal(signal.SIGINT, self._interrupt)
            signal.signal(signal.SIGTERM, self._interrupt)
            return self._collect()
        finally:
            self._kill()
            os.close(store)

    def _start(self, store: Path) -> None:
        context = multiprocessing.get_context("fork")
        for rank in range(self._config.world_size):
            ours, theirs = context.Pipe()
            arguments = (self._config, self._arrivals, rank, store, theirs)
            process = context.Process(target=run_worker, args=arguments, name=f"rank {rank}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes[ours] = rank

    def _collect(self) -> list[Done]:
        """Wait until every rank is done or one has died."""
        done: dict[int, Done] = {}
        sentinels = [process.sentinel for process in self._processes]
        while len(done) < len(self._processes):
            ready = wait([*self._pipes, *sentinels])
            for pipe in [one for one in self._pipes if one in ready]:
                self._take_message(pipe, done)
            if len(done) < len(self._processes) and any(one in ready for one in sentinels):
                raise GroupError(self._explain_death())
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()
        return [done[rank] for rank in range(len(self._processes))]

    def _take_message(self, pipe: Connection, done: dict[int, Done]) -> None:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError):
            return  # the rank has died; its sentinel says how
        if isinstance(message, Ready):
            self._on_ready()
        elif isinstance(message, Refused):
            raise GroupError(message.reason)
        elif isinstance(message, Done):
            done[self._pipes[pipe]] = message

    def _explain_death(self) -> str:
        """Name the rank that died first: the one whose end is not the consequence of another's."""
        if self._interrupts > 1:
            return "interrupted"
        deadline = time.monotonic() + _GRACE_S
        while not (causes := self._dead(ignoring=EXIT_PEER_LOST)) and time.monotonic() < deadline:
            time.sleep(_GRACE_S / 100)
        process = (causes or self._dead(ignoring=None))[0]
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        others = len(self._processes) - 1
        return f"{process.name} (pid {process.pid}) {how}; the run failed and its {others} other ranks were stopped"

    def _dead(self, *, ignoring: int | None) -> list[ForkProcess]:
        return [process for process in self._processes if process.exitcode not in (None, ignoring)]

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        self._interrupts += 1
        rank0 = self._processes[0]
        if rank0.pid is not None and rank0.exitcode is None:
            os.kill(rank0.pid, signal.SIGTERM if self._interrupts == 1 else signal.SIGKILL)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
