"""The live table on a terminal, on a separate screen, so that the earlier content is back at the end."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcached.control.rendering.status_table import display_of, status_lines
from kvcached.control.rendering.table import wrapped
from kvcached.control.rendering.text import BAD, DEFAULT_WIDTH, FAINT, styled
from kvcached.printable_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvcached.control.queries.directory_view import View
    from kvcached.ledger.instances import InstanceStatus

SAMPLES = 48
"""How many samples of idle tokens the small curve shows."""

_DEFAULT_HEIGHT = 24
_ENTER = "\033[?1049h\033[?25l"
_LEAVE = "\033[?25h\033[?1049l"
_HOME = "\033[H"
_END_OF_LINE = "\033[K"
_END_OF_SCREEN = "\033[J"


class Samples:
    """Idle tokens over time by instance name and replica: one sample per interval, the last one up to date."""

    def __init__(self, interval_s: float) -> None:
        """Take a sample every ``interval_s`` seconds."""
        self._interval_s = interval_s
        self._next = 0.0
        self._taken: dict[tuple[str, int], deque[int]] = {}

    def take(self, instances: Sequence[InstanceStatus]) -> Mapping[tuple[str, int], Sequence[int]]:
        """Note the figures as they are now, and return all that were noted of these instances."""
        now = time.monotonic()
        due = now >= self._next
        if due:
            self._next = max(self._next + self._interval_s, now)
        alive = {
            (instance.name, replica.replica): replica.idle_tokens
            for instance in instances
            for replica in instance.replicas
        }
        for key, idle in alive.items():
            taken = self._taken.setdefault(key, deque(maxlen=SAMPLES))
            if taken and not due:
                taken[-1] = idle
            else:
                taken.append(idle)
        self._taken = {key: taken for key, taken in self._taken.items() if key in alive}
        return self._taken


def show_live(views: Iterator[View], path: str, interval_s: float) -> None:
    """Draw each view until interrupted; the last one stays behind on the terminal."""
    samples = Samples(interval_s)
    lines: list[str] = []
    try:
        with _own_screen():
            for view in views:
                lines = _frame(view, path, samples)
                _draw(lines)
    finally:
        print("\n".join(lines), flush=True)


@contextmanager
def _own_screen() -> Iterator[None]:
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _frame(view: View, path: str, samples: Samples) -> list[str]:
    display = display_of(sys.stdout)
    width = display.width or DEFAULT_WIDTH
    clock = time.strftime("%H:%M:%S")
    title = f"{printable(path)}  {len(view.instances)} instance(s)  {clock}  Ctrl-C ends"
    lines = [styled(title[:width], FAINT, colour=display.colour)]
    if view.instances:
        lines += status_lines(view.instances, display, samples.take(view.instances))
    lines += wrapped(view.not_found, FAINT, width, colour=display.colour) if view.not_found else ()
    for problem in view.problems:
        lines += wrapped(problem, BAD, width, colour=display.colour)
    return lines


def _draw(lines: Sequence[str]) -> None:
    try:
        height = os.get_terminal_size(sys.stdout.fileno()).lines or _DEFAULT_HEIGHT
    except OSError:
        height = _DEFAULT_HEIGHT
    shown = lines if len(lines) < height else [*lines[: height - 2], f"... {len(lines) - height + 2} more line(s)"]
    sys.stdout.write(_HOME + "".join(f"{line}{_END_OF_LINE}\r\n" for line in shown) + _END_OF_SCREEN)
    sys.stdout.flush()
