"""A fleet in etcd as one node's agent sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached.fleet.etcd.certificates import certificates_of
from kvcached.fleet.etcd.etcd_client import EtcdClient
from kvcached.fleet.etcd.etcd_keys import FleetKeys
from kvcached.fleet.etcd.follower import DocumentFollower
from kvcached.fleet.etcd.reporter import TTL_S, StatusReporter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcached.fleet.agent import NodeIdentity
    from kvcached.fleet.fleet_url import FleetUrl
    from kvcached.fleet.store import Wishes
    from kvcached.fleet.target_status import TargetStatus


def open_client(url: FleetUrl) -> EtcdClient:
    """Return a client of a fleet's etcd; nothing is connected yet."""
    return EtcdClient(url.endpoints, certificates_of() if url.tls else None)


class EtcdSource:
    """A source for an agent: one thread follows the documents, one writes the statuses."""

    def __init__(self, url: FleetUrl, node: NodeIdentity, ledger_dir: str, ttl_s: int = TTL_S) -> None:
        # A client each: one that changes its member must not cut off the other's calls.
        self._clients = (open_client(url), open_client(url))
        self._keys = FleetKeys(url.name)
        self._node = node
        self._ledger_dir = ledger_dir
        self._ttl_s = ttl_s

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to follow."""
        following, writing = self._clients
        self._follower = DocumentFollower(following, self._keys, self._node.name, wake)
        self._reporter = StatusReporter(
            writing,
            self._keys,
            self._node,
            self._ledger_dir,
            ttl_s=self._ttl_s,
            agents=lambda: self._follower.agents,
            on_tick=self._follower.tick,
        )
        self._follower.start()
        self._reporter.start()

    def read(self) -> Wishes:
        """Return what is known now; an agent whose node's name is another machine's knows nothing."""
        wishes, refusal = self._follower.wishes, self._reporter.refusal
        return replace(wishes, known=False, fault=refusal) if refusal else wishes

    def report(self, statuses: Mapping[str, TargetStatus]) -> None:
        """Take the statuses of all targets of this node."""
        self._reporter.report(statuses)

    def close(self) -> None:
        """Stop following, and take the node's presence back."""
        self._follower.close()
        self._reporter.close()
        for client in self._clients:
            client.close()
