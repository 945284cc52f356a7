"""Writes one node's presence and statuses to etcd, under a lease that ends with the agent."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import threading
import time
from typing import TYPE_CHECKING

from kvcached import __version__
from kvcached.errors import KvcachedError
from kvcached.fleet.document import DocumentError, parse_object
from kvcached.fleet.target_status import encode_status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcached.fleet.agent import NodeIdentity
    from kvcached.fleet.etcd.etcd_client import EtcdClient
    from kvcached.fleet.etcd.etcd_keys import FleetKeys
    from kvcached.fleet.target_status import TargetStatus

TTL_S = 60
RENEWALS = 3
"""How often a lease is renewed in its time, so that two lost renewals do not end it."""

LEAST_SPREAD_S = 0.2
AGENTS_PER_S = 1000
"""Statuses are written after a random delay, longer in a large fleet: this many agents may write in a second."""

BATCH = 64
"""How many statuses are written at once; etcd takes 128 operations in one transaction."""

TICK_S = 1.0

_log = logging.getLogger(__name__)


class StatusReporter:
    """One thread that writes what :meth:`report` was given, where it changed, and keeps the lease.

    ``on_tick`` is called about once a second on this thread, ``agents`` says how many agents the fleet has.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: FleetKeys,
        node: NodeIdentity,
        ledger_dir: str,
        *,
        ttl_s: int = TTL_S,
        agents: Callable[[], int] = lambda: 0,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._node = node
        self._presence = _presence(node, ledger_dir)
        self._ttl_s = ttl_s
        self._agents = agents
        self._on_tick = on_tick
        self._wanted: dict[str, bytes] = {}
        self._written: dict[str, bytes] = {}
        self._lease = 0
        self._renew_at = 0.0
        self._reported = self._tidied = False
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcached-reporter", daemon=True)
        self.refusal = ""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def report(self, statuses: Mapping[str, TargetStatus]) -> None:
        """Take the statuses of all targets of this node. Any one thread; does not block."""
        prefix = self._keys.statuses_of(self._node.name)
        wanted = {f"{prefix}{name}": encode_status(status) for name, status in statuses.items()}
        if wanted != self._wanted or not self._reported:
            self._wanted, self._reported = wanted, True
            self._changed.set()

    def close(self) -> None:
        """End, and take the presence and the statuses back, if etcd can be reached."""
        self._stopping.set()
        self._changed.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._keep_lease()
                if self._changed.wait(TICK_S):
                    self._stopping.wait(self._spread())
                    self._changed.clear()
                if not self.refusal:
                    self._write()
            except KvcachedError as error:
                _log.debug("statuses are not written: %s", error)
                self._client.change_endpoint()
                self._stopping.wait(TICK_S)
                self._changed.set()
            self._on_tick()
        self._leave()

    def _spread(self) -> float:
        return random.uniform(0, max(LEAST_SPREAD_S, self._agents() / AGENTS_PER_S))  # noqa: S311 - jitter

    def _keep_lease(self) -> None:
        """Have a lease, and the node's presence under it; a lost lease takes all statuses with it."""
        now = time.monotonic()
        if now < self._renew_at:
            return
        if self._lease == 0 or not self._client.keep_alive(self._lease):
            self._lease, self._written = 0, {}
            lease = self._client.grant(self._ttl_s)
            self._lease = lease
            self._announce(lease)
            self._tidied = False
            self._changed.set()
        pause = self._ttl_s / RENEWALS
        self._renew_at = now + pause * random.uniform(0.9, 1.1)  # noqa: S311 - jitter

    def _announce(self, lease: int) -> None:
        """Write the presence, unless another machine uses this node's name."""
        key = f"{self._keys.agents}{self._node.name}"
        found = self._client.get(key)
        if found is not None and _machine_of(found.value or b"") != self._presence["machine"]:
            self._refuse()
            return
        revision = 0 if found is None else found.revision
        written, _ = self._client.compare_and_set(key, json.dumps(self._presence).encode(), revision, lease)
        if written:
            self.refusal = ""
        else:
            self._refuse()

    def _refuse(self) -> None:
        self._lease = 0  # ask again at the next renewal
        self.refusal = (
            f"another machine or ledger directory is node {self._node.name!r}; give this agent another --node"
        )

    def _drop_leftovers(self) -> None:
        """Delete statuses of this node that its former agent wrote and that nobody speaks for any more."""
        (found,) = self._client.list_prefixes((self._keys.statuses_of(self._node.name),)).entries
        stale = [(entry.key, None) for entry in found if entry.key not in self._wanted]
        for start in range(0, len(stale), BATCH):
            self._client.write(stale[start : start + BATCH], 0)

    def _write(self) -> None:
        if self._reported and not self._tidied:
            self._drop_leftovers()
            self._tidied = True
        wanted, written = self._wanted, self._written
        changes: list[tuple[str, bytes | None]] = [
            (key, wanted.get(key))
            for key in sorted(wanted.keys() | written.keys())
            if wanted.get(key) != written.get(key)
        ]
        for start in range(0, len(changes), BATCH):
            batch = changes[start : start + BATCH]
            self._client.write(batch, self._lease)
            self._written = {**self._written, **{key: value for key, value in batch if value is not None}}
            for key, value in batch:
                if value is None:
                    self._written.pop(key, None)

    def _leave(self) -> None:
        if self._lease:
            try:
                self._client.revoke(self._lease)
            except KvcachedError as error:
                _log.debug("the lease ends by itself: %s", error)


def _presence(node: NodeIdentity, ledger_dir: str) -> dict[str, object]:
    return {
        "machine": _machine(ledger_dir),
        "version": __version__,
        "labels": dict(node.labels),
        "ledger_dir": ledger_dir,
    }


def _machine(ledger_dir: str) -> str:
    """Return what tells this machine and ledger directory from others of the same node name."""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            machine = file.read().strip()
    except OSError:
        machine = ""
    return hashlib.sha256(f"{machine}\0{ledger_dir}".encode(errors="surrogateescape")).hexdigest()[:16]


def _machine_of(presence: bytes) -> object:
    try:
        return parse_object(presence).get("machine")
    except DocumentError:
        return None
