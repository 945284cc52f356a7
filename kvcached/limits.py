"""A limit as people write it: an integer, ``16k`` or ``2m``, ``unlimited``, ``none``; and as they read it."""

from __future__ import annotations

import re

from kvcached.values import MAX_LIMIT_TOKENS, UNLIMITED

_WORDS = {"unlimited": UNLIMITED, "none": 0, "-1": UNLIMITED, "0": 0}
_NUMBER = re.compile(r"([1-9][0-9]*)([km]?)")
_FACTORS = {"": 1, "k": 1000, "m": 1_000_000}
_NEGATIVE = re.compile(r"-[1-9][0-9]*")


def parse_limit(text: str) -> int:
    """Parse a limit into tokens. Raises ValueError with a sentence for anything doubtful.

    Nothing is guessed: a fraction, an exponent, a sign or white space is refused, so that a typing mistake never turns
    into 0 or "unlimited".
    """
    lowered = text.lower()
    if lowered in _WORDS:
        return _WORDS[lowered]
    match = _NUMBER.fullmatch(lowered)
    if match is None:
        message = f"{text!r} is not a limit; give a number of tokens, 16k, 2m, 'unlimited' or 'none'"
        raise ValueError(message)
    limit = int(match[1]) * _FACTORS[match[2]] if len(match[1]) <= len(str(MAX_LIMIT_TOKENS)) else MAX_LIMIT_TOKENS + 1
    if limit > MAX_LIMIT_TOKENS:
        message = f"{text!r} is above the largest limit, {MAX_LIMIT_TOKENS} tokens; use 'unlimited' for no limit"
        raise ValueError(message)
    return limit


def parse_startup_limit(text: str) -> int:
    """Parse a startup limit into tokens: as :func:`parse_limit`, and any negative number is unlimited.

    Raises ValueError with a sentence for anything else.
    """
    return UNLIMITED if _NEGATIVE.fullmatch(text) else parse_limit(text)


def format_limit(limit_tokens: int) -> str:
    """Return a limit for people."""
    return "unlimited" if limit_tokens < 0 else f"{limit_tokens:,} tokens"
