"""A limit as people write it, and as they read it.

That is a number of tokens (an integer, ``16k``, ``2m``, ``unlimited``, ``none``), or an amount of an engine's KV that
only its own figures turn into tokens: ``50%`` of the capacity, ``4GiB`` or ``500MB`` of memory.
"""

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


class Amount:
    """A share of an engine's capacity, or a number of bytes of its KV: ``text`` is how it was written."""

    def __init__(self, text: str, *, percent: float | None = None, size_bytes: int = 0) -> None:
        self.text = text
        self._percent = percent
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        """The number of bytes; 0 of a share of the capacity."""
        return self._size_bytes

    def tokens(self, capacity_tokens: int, token_bytes: int) -> int:
        """Return the tokens that this is in an engine of these figures, rounded down.

        Raises ValueError, with what to do, where the engine does not report the figure that it takes, or where it is
        less than a token.
        """
        if self._percent is not None:
            figure, what, tokens = capacity_tokens, "its capacity", int(capacity_tokens * self._percent / 100)
        else:
            figure, what, tokens = token_bytes, "its bytes per token", self._size_bytes // max(token_bytes, 1)
        if figure <= 0:
            message = f"{self.text} cannot be turned into tokens: the engine does not report {what}; give tokens"
            raise ValueError(message)
        if tokens == 0 and self._percent != 0:
            message = f"{self.text} is less than one token of this engine; give more, or 'none'"
            raise ValueError(message)
        return min(tokens, MAX_LIMIT_TOKENS)


_PERCENT = re.compile(r"(0|[1-9][0-9]{0,2})(\.[0-9]{1,2})?%")
_BYTES = re.compile(r"(0|[1-9][0-9]{0,8})(\.[0-9]{1,3})?([kmgt])(i?)b")
_WHOLE_PERCENT = 100


def parse_amount(text: str) -> int | Amount:
    """Return the tokens, or the :class:`Amount`, that ``text`` says. Raises ValueError as :func:`parse_limit`."""
    lowered = text.lower()
    percent, size = _PERCENT.fullmatch(lowered), _BYTES.fullmatch(lowered)
    if percent is not None:
        share = float(lowered[:-1])
        if share > _WHOLE_PERCENT:
            message = f"{text!r} is more than the capacity; give up to 100%, or 'unlimited'"
            raise ValueError(message)
        return Amount(text, percent=share)
    if size is not None:
        factor = (1024 if size[4] else 1000) ** ("kmgt".index(size[3]) + 1)
        return Amount(text, size_bytes=int(float(size[1] + (size[2] or "")) * factor))
    return parse_limit(text)


def parse_startup_limit(text: str) -> int:
    """Parse a startup limit into tokens: as :func:`parse_limit`, and any negative number is unlimited.

    Raises ValueError with a sentence for anything else.
    """
    return UNLIMITED if _NEGATIVE.fullmatch(text) else parse_limit(text)


def format_limit(limit_tokens: int) -> str:
    """Return a limit for people."""
    return "unlimited" if limit_tokens < 0 else f"{limit_tokens:,} tokens"
