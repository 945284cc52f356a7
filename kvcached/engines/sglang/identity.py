"""How a replica introduces itself to the ledgers."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import TYPE_CHECKING

from kvcached.values import UNLIMITED, Identity

if TYPE_CHECKING:
    from kvcached.engines.sglang.placement import Placement
    from kvcached.settings import Settings


def identify(
    settings: Settings,
    placement: Placement,
    *,
    startup_limit_tokens: int,
    block_tokens: int,
    startup_cap_tokens: int = UNLIMITED,
) -> Identity:
    """Return the identity of the replica at ``placement``."""
    return Identity(
        instance_name=settings.instance_name,
        engine="sglang",
        engine_version=_version(),
        replica=placement.replica,
        tp_size=placement.width,
        pp_size=placement.pp_size,
        startup_limit_tokens=startup_limit_tokens,
        block_tokens=block_tokens,
        startup_cap_tokens=startup_cap_tokens,
    )


def _version() -> str:
    """Return SGLang's version; a build of one's own may have no distribution of that name, or no version at all."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get("sglang"), "__version__", "unknown"))
