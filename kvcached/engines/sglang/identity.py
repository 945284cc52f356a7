"""How a replica introduces itself to the ledgers."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from kvcached.values import Identity

if TYPE_CHECKING:
    from kvcached.engines.sglang.placement import Placement
    from kvcached.settings import Settings


def identify(settings: Settings, placement: Placement, *, startup_limit_tokens: int, block_tokens: int) -> Identity:
    """Return the identity of the replica at ``placement``."""
    return Identity(
        instance_name=settings.instance_name,
        engine="sglang",
        engine_version=metadata.version("sglang"),
        replica=placement.replica,
        tp_size=placement.width,
        pp_size=placement.pp_size,
        startup_limit_tokens=startup_limit_tokens,
        block_tokens=block_tokens,
    )
