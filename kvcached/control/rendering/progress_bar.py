"""The progress bar of ``set --wait`` on a terminal: excess tokens going to zero."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcached.control.ending_signals import held_signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress as Bar

    from kvcached.ledger.waiting import Progress


class Shrinking:
    """Turns reports of a wait into a bar that fills as the excess goes."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("waiting for the engine", total=None)
        self._most = 0

    def __call__(self, progress: Progress) -> None:
        """Show how far the wait has come."""
        self._most = max(self._most, progress.excess_tokens)
        if not self._most:
            return
        gone = self._most - progress.excess_tokens
        text = f"{progress.excess_tokens:,} tokens to go"
        self._bar.update(self._task, total=self._most, completed=gone, description=text)


@contextmanager
def shrinking() -> Iterator[Shrinking | None]:
    """Show a progress bar on standard error while the context lasts; None where the library for it is missing."""
    try:
        from rich.console import Console  # noqa: PLC0415 - an optional comfort: engines' environments may lack it
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    except ImportError:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    try:
        with held_signals():  # a start that is interrupted hides the cursor, and nobody shows it again
            bar.start()
        yield Shrinking(bar)
    finally:
        with held_signals():
            bar.stop()
