"""Placement groups."""

from __future__ import annotations


class PlacementGroup:
    """Some bundles of resources."""
