"""The family of errors that users may meet, under one base."""

from __future__ import annotations


class KvcachedError(Exception):
    """The base of all errors that this package raises on purpose, apart from TypeError for a wrong type of argument."""
