"""What operators do with a fleet in etcd: read all of it, and write documents and holds by compare-and-set."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvcached.fleet.document import DocumentError, encode, parse_document, parse_object
from kvcached.fleet.etcd.etcd_client import EtcdError
from kvcached.fleet.etcd.etcd_keys import FleetKeys
from kvcached.fleet.etcd.etcd_source import open_client
from kvcached.fleet.fleet_view import FleetTarget, FleetView
from kvcached.fleet.operations import WriteOutcome
from kvcached.fleet.store import hold_of, stored_of
from kvcached.fleet.target_status import TargetStatus, parse_status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    from typing_extensions import Self

    from kvcached.fleet.fleet_url import FleetUrl
    from kvcached.fleet.store import Hold

    Answer = TypeVar("Answer")


class FleetOperator:
    """Reads and writes one fleet. For one thread; use as a context manager. Raises :class:`EtcdError`."""

    def __init__(self, url: FleetUrl) -> None:
        self._client = open_client(url)
        self._members = len(url.endpoints)
        self._keys = FleetKeys(url.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def read(self) -> FleetView:
        """Return the whole fleet at one revision."""
        keys = self._keys
        prefixes = (keys.desired, keys.agents, keys.statuses, keys.holds)
        listing = self._patiently(lambda: self._client.list_prefixes(prefixes))
        desired, agents, statuses, holds = [
            [(entry.key[len(prefix) :], entry) for entry in entries]
            for prefix, entries in zip(prefixes, listing.entries, strict=True)
        ]
        return FleetView(
            listing.revision,
            {name: stored_of(str(entry.revision), entry.value or b"") for name, entry in desired},
            {node: _presence(entry.value or b"") for node, entry in agents},
            tuple(_target(place, entry.value or b"") for place, entry in statuses),
            {_place(place): hold_of(entry.value or b"") for place, entry in holds},
        )

    def write(self, instance: str, fields: Mapping[str, Any] | None, revision: int) -> WriteOutcome:
        """Write a document (None: delete it) if its last revision is ``revision``, 0 meaning that there is none.

        Raises :class:`DocumentError` for fields that are no document. A write whose answer was lost is settled by
        reading back; the outcome is ``unknown`` only if that fails as well.
        """
        key = f"{self._keys.desired}{instance}"
        text = None if fields is None else encode(fields)
        try:
            written, found = self._client.compare_and_set(key, text, revision)
        except EtcdError as error:
            return self._settle(key, text, revision, error)
        return WriteOutcome(written, 0 if found is None else found.revision)

    def _settle(self, key: str, text: bytes | None, revision: int, error: EtcdError) -> WriteOutcome:
        """Find out what became of a write that was not answered."""
        self._client.change_endpoint()
        try:
            found = self._patiently(lambda: self._client.get(key))
        except EtcdError:
            return WriteOutcome(0, 0, unknown=True, reason=str(error))
        value = None if found is None else found.value
        stored = 0 if found is None else found.revision
        if stored == revision and not (value is None and text is None):
            return WriteOutcome(0, stored, reason=f"it was not there when read back: {error}", failed=True)
        if value == text:
            return WriteOutcome(stored or revision, 0)
        return WriteOutcome(0, stored, unknown=_id_of(value) == "", reason=str(error))

    def hold(self, node: str, instance: str, hold: Hold | None) -> None:
        """Write a hold, or take it back (None)."""
        key = f"{self._keys.holds}{node}/{instance}"
        text = None if hold is None else json.dumps({"note": hold.note, "until": hold.until}).encode()
        self._patiently(lambda: self._client.write([(key, text)], 0))

    def _patiently(self, action: Callable[[], Answer]) -> Answer:
        """Do what may be done twice; with each member once before giving up."""
        for _ in range(self._members):
            try:
                return action()
            except EtcdError:
                self._client.change_endpoint()
        return action()


def _target(place: str, text: bytes) -> FleetTarget:
    node, instance = _place(place)
    try:
        return FleetTarget(node, instance, parse_status(text))
    except (DocumentError, TypeError) as error:
        return FleetTarget(node, instance, TargetStatus("unreadable", reason=str(error)))


def _place(place: str) -> tuple[str, str]:
    node, _, instance = place.partition("/")
    return node, instance


def _presence(text: bytes) -> Mapping[str, Any]:
    try:
        return parse_object(text)
    except DocumentError:
        return {}


def _id_of(text: bytes | None) -> str:
    try:
        return parse_document(text or b"").id
    except DocumentError:
        return ""
