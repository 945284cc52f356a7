"""Follows the documents and holds of one node in etcd: list, then watch from the next revision; after any break again.

Revisions are compared for equality only: an etcd that was restored from a backup has smaller ones, and a watch from a
revision in the future would be silent for ever.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import TYPE_CHECKING

from kvcached.errors import KvcachedError
from kvcached.fleet.store import Wishes, hold_of, stored_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcached.fleet.etcd.etcd_client import Entry, EtcdClient, Listing, Watch
    from kvcached.fleet.etcd.etcd_keys import FleetKeys
    from kvcached.fleet.store import Hold, Stored

AGAIN_S = (0.1, 0.6)
"""How long to wait before the next list after a break, in seconds: at random, so that agents do not come together."""

_log = logging.getLogger(__name__)


class DocumentFollower:
    """One thread that keeps :attr:`wishes` equal to what etcd holds. :meth:`tick` is for another one, each second."""

    def __init__(self, client: EtcdClient, keys: FleetKeys, node: str, wake: Callable[[], None]) -> None:
        self._client = client
        self._keys = keys
        self._holds_prefix = keys.holds_of(node)
        self._wake = wake
        self._watch: Watch | None = None
        self._cluster = 0
        self._documents: dict[str, Stored] = {}
        self._holds: dict[str, Hold] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvcached-follower", daemon=True)
        self.wishes = Wishes()
        self.agents = 0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tick(self) -> None:
        """See that the watch is alive."""
        watch = self._watch
        if watch is not None:
            watch.tick()

    def close(self) -> None:
        """End, and wait for it; the client has to be closed before."""
        self._stopping.set()
        watch = self._watch
        if watch is not None:
            watch.cancel()
        self._thread.join(timeout=5.0)

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                listing = self._client.list_prefixes((self._keys.desired, self._holds_prefix), self._keys.agents)
                self._take_listing(listing)
                self._watch = self._client.watch((self._keys.desired, self._holds_prefix), listing.revision + 1)
                for changes in self._watch:
                    self._take(changes)
                    self._publish()
            except KvcachedError as error:
                if not self._stopping.is_set():
                    self._publish(fault=str(error))
                    self._client.change_endpoint()
            self._stopping.wait(random.uniform(*AGAIN_S))  # noqa: S311 - jitter

    def _take_listing(self, listing: Listing) -> None:
        if self._cluster not in {0, listing.cluster_id}:
            _log.warning("etcd is another cluster now (%x); its documents are followed", listing.cluster_id)
        self._cluster, self.agents = listing.cluster_id, listing.count
        self._documents, self._holds = {}, {}
        for entries in listing.entries:
            self._take(entries)
        self._publish()

    def _take(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.key.startswith(self._keys.desired):
                name = entry.key[len(self._keys.desired) :]
                if entry.value is None:
                    self._documents.pop(name, None)
                else:
                    self._documents[name] = stored_of(str(entry.revision), entry.value)
            else:
                name = entry.key[len(self._holds_prefix) :]
                if entry.value is None:
                    self._holds.pop(name, None)
                else:
                    self._holds[name] = hold_of(entry.value)

    def _publish(self, fault: str = "") -> None:
        known = not fault or self.wishes.known
        self.wishes = Wishes(dict(self._documents), dict(self._holds), known, fault)
        self._wake()
