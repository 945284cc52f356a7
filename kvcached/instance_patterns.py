"""Which instances a command means: one name, a pattern, or all."""

from __future__ import annotations

import re

from kvcached.settings import SettingsError, check_instance_name

ANY = "*"
"""The pattern of ``--all``."""

_PATTERN = r"[A-Za-z0-9._*?\[\]!-]{1,63}"  # compiled where it is needed, which most calls never come to
_WILD = frozenset("*?[")


def check_name_or_pattern(text: str) -> str:
    """Return ``text`` if it can name instances, else raise :class:`SettingsError`."""
    if not is_pattern(text):
        return check_instance_name(text)
    if re.fullmatch(_PATTERN, text) is None:
        message = f"pattern {text!r} is invalid; use 1 to 63 of A-Z a-z 0-9 . _ - and the wild cards * ? [...]"
        raise SettingsError(message)
    return text


def is_pattern(text: str) -> bool:
    """Return whether ``text`` may match several instances."""
    return not _WILD.isdisjoint(text)
