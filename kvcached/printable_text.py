"""The one filter for text from outside: what another process wrote, before it is shown or given to a program."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` on one line and without anything that steers a terminal: the filter for whatever others wrote.

    Control characters, marks that turn the reading direction, line separators and bytes that are no text are shown
    as their numbers.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    if _FIRST_UNDECODED <= char <= _LAST_UNDECODED:  # a byte of a file name that is no text
        return f"\\x{ord(char) - 0xDC00:02x}"
    return ascii(char)[1:-1]


_FIRST_UNDECODED, _LAST_UNDECODED = "\udc80", "\udcff"
