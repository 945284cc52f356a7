"""Words, numbers and colours as people read them on a terminal, in a pipe or in a log."""

from __future__ import annotations

import io
import os
import sys

from kvcached.printable_text import printable

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from typing import TextIO

DEFAULT_WIDTH = 80

GOOD, BUSY, BAD, FAINT, STRONG, IDLE, ACTIVE = "32", "33", "31", "2", "1", "36", "34"
"""The styles, as the codes that terminals know them by."""

_COMPACT_FROM = 10_000_000
_UNITS = ((1_000_000_000_000, "T"), (1_000_000_000, "G"), (1_000_000, "M"))
_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86400
_MINUTES = 60
_HOURS = 24
_THOUSAND = 1000
_KIB = 1024


def harden(stream: TextIO | None) -> None:
    """Let ``stream`` write every text: what its encoding lacks is escaped, and is no error."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def say(message: str) -> None:
    """Print one line to standard output, whatever it holds."""
    print(printable(message))


def complain(message: str, program: str = "kvcached-control") -> None:
    """Print one line to standard error, after the program's name; to nobody if there is no standard error."""
    if sys.stderr is not None:
        print(f"{program}: {printable(message)}", file=sys.stderr, flush=True)


def styled(text: str, style: str, *, colour: bool) -> str:
    """Return ``text`` in a style, or without one; in both cases without anything else that steers a terminal."""
    text = printable(text)
    return f"\033[{style}m{text}\033[0m" if colour and style and text else text


def wants_colour(stream: TextIO) -> bool:
    """Return whether colours go to ``stream``: a terminal that knows them, and ``NO_COLOR`` is not set."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def width_of(stream: TextIO) -> int | None:
    """Return how many columns fit on a line of ``stream``; None if it is no terminal, where nothing is cut."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except OSError:
        return DEFAULT_WIDTH


def can_show(stream: TextIO, characters: str) -> bool:
    """Return whether the encoding of ``stream`` has these characters."""
    try:
        characters.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def count(number: int) -> str:
    """Return a number of tokens: exact with separators, above ten millions rounded with a unit."""
    if number < _COMPACT_FROM:
        return f"{number:,}"
    # What is rounded to a thousand of a unit is one of the next.
    fitting = (pair for pair in _UNITS if round(number / (pair[0] // _THOUSAND), 1) >= _THOUSAND)
    factor, unit = next(fitting)
    return f"{number / factor:.1f}{unit}"


def size(number: int) -> str:
    """Return a number of bytes."""
    shown = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(shown) < _KIB:
            return f"{shown:.0f} {unit}" if unit == "B" else f"{shown:.1f} {unit}"
        shown /= _KIB
    return f"{shown:.1f} TiB"


def limit_text(limit_tokens: int) -> str:
    """Return a limit."""
    return "unlimited" if limit_tokens < 0 else count(limit_tokens)


def pair_text(revision: int, limit_tokens: int) -> str:
    """Return a revision and its limit."""
    return f"r{revision} {limit_text(limit_tokens)}"


def age(seconds: float | None) -> str:
    """Return how long ago something was."""
    if seconds is None:
        return "never"
    seconds = max(0.0, seconds)
    if round(seconds, 1) < _MINUTE_S:
        return f"{seconds:.1f} s"
    if round(seconds / _MINUTE_S) < _MINUTES:
        return f"{seconds / _MINUTE_S:.0f} min"
    hours = round(seconds / _HOUR_S)
    return f"{hours} h" if hours < _HOURS else f"{seconds / _DAY_S:.0f} d"
