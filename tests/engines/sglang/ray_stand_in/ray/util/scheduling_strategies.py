"""Strategies of scheduling."""

from __future__ import annotations


class PlacementGroupSchedulingStrategy:
    """Schedule into a placement group."""
