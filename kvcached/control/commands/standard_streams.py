"""Standard output and standard error of the command line: what happens to them changes nothing of what was done."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import contextmanager, suppress

from kvcached.control.rendering.text import harden

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

_STANDARD = 3
"""How many descriptors are standard ones: below this number nothing of ours may be opened."""


class Stream:
    """A text stream that drops what cannot be written any more, and remembers why and what was said.

    ``error`` is the first failure. With ``raises`` it is raised as well, which ends a command that has no other end;
    ``acts`` tells of a command that does something besides writing.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.raises = False
        self.acts = False
        self.error: OSError | None = None
        self.said: list[str] = []

    def write(self, text: str) -> int:
        """Write, as far as that is possible."""
        if len(self.said) < _REMEMBERED:
            self.said.append(text)
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)
            return len(text)

    def flush(self) -> None:
        """Flush, as far as that is possible."""
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.error = self.error or error
        with suppress(OSError):  # what Python still holds must not fail again when the process ends
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        if self.raises:
            raise error

    @property
    def reader_left(self) -> bool:
        """Whether whoever read the other end of a pipe went away, which is their choice and no failure."""
        return self.error is not None and self.error.errno == errno.EPIPE

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


_REMEMBERED = 64


@contextmanager
def standard_streams() -> Iterator[tuple[Stream, Stream]]:
    """Let ``sys.stdout`` and ``sys.stderr`` be streams that never fail while the context lasts."""
    before = sys.stdout, sys.stderr
    _fill_standard_descriptors()
    output, errors = Stream(before[0] or _opened(1)), Stream(before[1] or _opened(2))
    for stream in before:
        harden(stream)
    sys.stdout, sys.stderr = output, errors
    try:
        yield output, errors
    finally:
        errors.flush()
        output.raises = False
        output.flush()
        sys.stdout, sys.stderr = before


def _fill_standard_descriptors() -> None:
    """Open what is closed of 0, 1 and 2 into nothing, so that no file of ours comes to lie where messages go."""
    with suppress(OSError):  # none is left: then none of these is closed
        descriptor = os.open(os.devnull, os.O_RDWR)
        while descriptor < _STANDARD:
            descriptor = os.dup(descriptor)
        os.close(descriptor)


def _opened(descriptor: int) -> TextIO:
    return open(descriptor, "w", encoding="utf-8", closefd=False)
