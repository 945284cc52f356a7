"""Which source a fleet's URL means; only the one that is used is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.fleet.file import FileSource
from kvcached.fleet.fleet_url import FleetUrlError

if TYPE_CHECKING:
    from kvcached.fleet.agent import NodeIdentity
    from kvcached.fleet.fleet_url import FleetUrl
    from kvcached.fleet.store import DocumentSource


def open_source(url: FleetUrl, node: NodeIdentity, status_path: str | None) -> DocumentSource:
    """Return the source of a fleet for one node's agent; nothing is read yet. Raises :class:`FleetUrlError`."""
    if url.path:
        return FileSource(url.path, node.name, status_path)
    message = "this release follows file:PATH only"
    raise FleetUrlError(message)
