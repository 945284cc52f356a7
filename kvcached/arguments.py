"""What a caller may ask for; checked before anything is read or written, alike from Python and on the command line."""

from __future__ import annotations

import re

from kvcached.values import MAX_LIMIT_TOKENS, UNLIMITED

MAX_NOTE_BYTES = 55
"""How long a note may be: what a ledger's record of publications has room for."""

MAX_WAIT_S = 1e9
"""How long a wait may be: some thirty years, far from where clocks overflow."""

_INCARNATION = r"[0-9A-Fa-f]{16}"  # compiled where it is needed, which most calls never come to


def check_limit(limit_tokens: int) -> int:
    """Return a limit; raise TypeError or ValueError, with a sentence that says what a limit is."""
    if isinstance(limit_tokens, bool) or not isinstance(limit_tokens, int):
        message = f"limit_tokens must be an int (tokens), not {type(limit_tokens).__name__}"
        raise TypeError(message)
    if not UNLIMITED <= limit_tokens <= MAX_LIMIT_TOKENS:
        given = limit_tokens if abs(limit_tokens) < 10**20 else "a number of more than 20 digits"
        message = f"limit_tokens must be -1 (unlimited), 0 (none) or up to {MAX_LIMIT_TOKENS}, not {given}"
        raise ValueError(message)
    return limit_tokens


def check_revision(if_revision: int) -> int:
    """Return a revision to compare with; raise TypeError for what is none."""
    if isinstance(if_revision, bool) or not isinstance(if_revision, int):
        message = f"if_revision must be an int or None, not {type(if_revision).__name__}"
        raise TypeError(message)
    return if_revision


def check_incarnation(if_incarnation: str) -> str:
    """Return an incarnation to compare with; raise TypeError or ValueError for what is none."""
    if not isinstance(if_incarnation, str):
        message = f"if_incarnation must be a str or None, not {type(if_incarnation).__name__}"
        raise TypeError(message)
    if re.fullmatch(_INCARNATION, if_incarnation) is None:
        message = f"{if_incarnation!r} is not an incarnation; give the 16 hex digits that status --json shows"
        raise ValueError(message)
    return if_incarnation.lower()


def check_wait(seconds: float) -> float:
    """Return a number of seconds to wait; raise TypeError or ValueError for what no clock can wait for."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        message = f"wait must be a number of seconds or None, not {type(seconds).__name__}"
        raise TypeError(message)
    if not 0 <= seconds <= MAX_WAIT_S:  # a NaN is in no range
        message = f"wait must be from 0 to {MAX_WAIT_S:.0f} seconds"
        raise ValueError(message)
    return float(seconds)


def check_note(note: str) -> str:
    """Return a note: what a ledger's record holds whole and a terminal may show; raise TypeError or ValueError."""
    if not isinstance(note, str):
        message = f"note must be a str, not {type(note).__name__}"
        raise TypeError(message)
    if len(note.encode(errors="surrogateescape")) > MAX_NOTE_BYTES or not note.isprintable():
        message = f"a note is one line of at most {MAX_NOTE_BYTES} bytes"
        raise ValueError(message)
    return note


def check_bound(limit_tokens: int, if_revision: int | None, if_incarnation: str | None) -> None:
    """Raise TypeError or ValueError unless a limit or cap and its conditions can be meant."""
    check_limit(limit_tokens)
    if if_revision is not None:
        check_revision(if_revision)
    if if_incarnation is not None:
        check_incarnation(if_incarnation)
