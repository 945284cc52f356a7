"""Placement of actors."""

from __future__ import annotations


class ReachedRayError(RuntimeError):
    """The launch got as far as Ray."""


def get_current_placement_group() -> None:
    """End the launch."""
    message = "reached Ray"
    raise ReachedRayError(message)
