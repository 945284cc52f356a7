"""Which source a fleet's URL means; only the one that is used is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.fleet.file import FileSource
from kvcached.fleet.fleet_url import FleetUrlError

if TYPE_CHECKING:
    from kvcached.fleet.agent import NodeIdentity
    from kvcached.fleet.etcd.etcd_operator import FleetOperator
    from kvcached.fleet.fleet_url import FleetUrl
    from kvcached.fleet.store import DocumentSource


def open_source(
    url: FleetUrl, node: NodeIdentity, ledger_dir: str, status_path: str | None, ttl_s: int
) -> DocumentSource:
    """Return the source of a fleet for one node's agent; nothing is read yet. Raises :class:`FleetUrlError`."""
    if url.path:
        return FileSource(url.path, node.name, status_path)
    try:
        from kvcached.fleet.etcd.etcd_source import EtcdSource  # noqa: PLC0415 - needs optional packages
    except ImportError as error:
        raise _lacking(error) from error
    return EtcdSource(url, node, ledger_dir, ttl_s)


def open_operator(url: FleetUrl) -> FleetOperator:
    """Return what writes a fleet's documents; nothing is connected yet. Raises :class:`FleetUrlError`."""
    if url.path:
        message = f"{url.path} is written by your own tools: replace the file; kvcached-agent --status-file has states"
        raise FleetUrlError(message)
    try:
        from kvcached.fleet.etcd.etcd_operator import FleetOperator  # noqa: PLC0415 - needs optional packages
    except ImportError as error:
        raise _lacking(error) from error
    return FleetOperator(url)


def _lacking(error: ImportError) -> FleetUrlError:
    message = f"a fleet in etcd needs grpcio and protobuf ({error}); pip install 'kvcached-control[fleet]'"
    return FleetUrlError(message)
