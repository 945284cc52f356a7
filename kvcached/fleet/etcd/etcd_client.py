"""The few calls of etcd that a fleet needs, over one gRPC channel to one member at a time.

Every call asks for a member that has a leader (``hasleader``), and has a deadline. A channel pings the member each 10
seconds, which etcd allows, and gives it up when there is no answer: without ``ping_timeout_ms`` a frozen member would
go unnoticed for a minute.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from kvcached.errors import KvcachedError
from kvcached.fleet.etcd.etcd_messages import DELETED, MESSAGES, MOD_REVISION, prefix_end

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcached.fleet.etcd.certificates import Certificates

CALL_S = 3.0
"""The deadline of a call, in seconds."""

PING_MS = 10_000
PING_TIMEOUT_MS = 5_000
WATCH_IDLE_S = 10.0
"""After how many seconds without a word a watch asks for progress."""

WATCH_PATIENCE_S = 5.0
"""How many seconds the answer to that may take."""

OPTIONS = (
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

METADATA = (("hasleader", "true"),)

_SERVICE = "/etcdserverpb."


class EtcdError(KvcachedError):
    """A call failed; the message says which member and why. What a write did is unknown then."""


@dataclass(frozen=True)
class Entry:
    """A key with its value and the revision of its last change; ``value`` is None of a key that is gone."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True)
class Listing:
    """All keys of some prefixes at one revision of one cluster; ``count`` is how many keys a third one has."""

    entries: tuple[tuple[Entry, ...], ...]
    revision: int
    cluster_id: int
    count: int = 0


class EtcdClient:
    """A client of one etcd cluster. Calls may be made from any thread; each raises :class:`EtcdError`."""

    def __init__(self, endpoints: Sequence[str], certificates: Certificates | None) -> None:
        """Prepare; nothing is connected yet. Without certificates the connection is plain."""
        self._endpoints = tuple(endpoints)
        self._certificates = certificates
        self._lock = threading.Lock()
        self._turn = 0
        self._channel: Any = None

    @property
    def endpoint(self) -> str:
        """The member that is in use, as HOST:PORT."""
        return self._endpoints[self._turn % len(self._endpoints)]

    def change_endpoint(self) -> None:
        """Go on to the next member; its channel reads the certificates' files again."""
        with self._lock:
            channel, self._channel = self._channel, None
            self._turn += 1
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Close the channel; what is under way fails."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def call(self, service: str, method: str, request: Any) -> Any:
        """Make one call, ``request`` being named after the method."""
        path = f"{_SERVICE}{service}/{method}"
        stub = self._open().unary_unary(path, _bytes_of, MESSAGES[_RESPONSES[method]].FromString)
        try:
            return stub(request, timeout=CALL_S, metadata=METADATA)
        except (grpc.RpcError, ValueError) as error:  # a ValueError from a channel that was closed meanwhile
            raise self._error(error) from error

    def list_prefixes(self, prefixes: Sequence[str], count: str = "") -> Listing:
        """Return all keys of these prefixes at one revision, and how many keys ``count`` has."""
        operations = [_range(prefix) for prefix in prefixes]
        if count:
            operations.append(_range(count, count_only=True))
        answer = self.call("KV", "Txn", MESSAGES["TxnRequest"](success=operations))
        ranges = [one.response_range for one in answer.responses]
        entries = tuple(tuple(map(_entry, found.kvs)) for found in ranges[: len(prefixes)])
        counted = ranges[-1].count if count else 0
        return Listing(entries, answer.header.revision, answer.header.cluster_id, counted)

    def get(self, key: str) -> Entry | None:
        """Return a key, None if it does not exist."""
        answer = self.call("KV", "Range", MESSAGES["RangeRequest"](key=key.encode()))
        return _entry(answer.kvs[0]) if answer.kvs else None

    def compare_and_set(self, key: str, value: bytes | None, revision: int, lease: int = 0) -> tuple[int, Entry | None]:
        """Write (None: delete) a key whose last revision is ``revision``, 0 meaning that it does not exist.

        Returns the revision of the write, or 0 and what is there instead.
        """
        compare = MESSAGES["Compare"](target=MOD_REVISION, key=key.encode(), mod_revision=revision)
        write = _delete(key) if value is None else _put(key, value, lease)
        request = MESSAGES["TxnRequest"](compare=[compare], success=[write], failure=[_range(key, exact=True)])
        answer = self.call("KV", "Txn", request)
        if answer.succeeded:
            return answer.header.revision, None
        found = answer.responses[0].response_range.kvs
        return 0, _entry(found[0]) if found else None

    def write(self, values: Sequence[tuple[str, bytes | None]], lease: int) -> None:
        """Write (None: delete) keys under a lease, all at one revision."""
        operations = [_delete(key) if value is None else _put(key, value, lease) for key, value in values]
        self.call("KV", "Txn", MESSAGES["TxnRequest"](success=operations))

    def grant(self, ttl_s: int) -> int:
        """Return a new lease of so many seconds."""
        return int(self.call("Lease", "LeaseGrant", MESSAGES["LeaseGrantRequest"](TTL=ttl_s)).ID)

    def revoke(self, lease: int) -> None:
        """End a lease; its keys go with it."""
        self.call("Lease", "LeaseRevoke", MESSAGES["LeaseRevokeRequest"](ID=lease))

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease; False if it has ended."""
        request = MESSAGES["LeaseKeepAliveRequest"](ID=lease)
        answer = MESSAGES["LeaseKeepAliveResponse"].FromString
        stub = self._open().stream_stream(f"{_SERVICE}Lease/LeaseKeepAlive", _bytes_of, answer)
        try:
            stream = stub(iter([request]), timeout=CALL_S, metadata=METADATA)
            remaining = next(iter(stream)).TTL
            stream.cancel()
        except (grpc.RpcError, ValueError, StopIteration) as error:
            raise self._error(error) from error
        return bool(remaining > 0)

    def watch(self, prefixes: Sequence[str], start_revision: int) -> Watch:
        """Watch prefixes from a revision on, which must not be in the future: etcd would be silent then."""
        answer = MESSAGES["WatchResponse"].FromString
        stub = self._open().stream_stream(f"{_SERVICE}Watch/Watch", _bytes_of, answer)
        return Watch(self, stub, prefixes, start_revision)

    def _open(self) -> Any:
        with self._lock:
            if self._channel is None:
                if self._certificates is None:
                    self._channel = grpc.insecure_channel(self.endpoint, OPTIONS)
                else:
                    self._channel = grpc.secure_channel(self.endpoint, self._certificates.credentials(), OPTIONS)
            return self._channel

    def _error(self, error: Exception) -> EtcdError:
        details = error.details() if isinstance(error, grpc.Call) else str(error)
        code = error.code().name.lower().replace("_", " ") if isinstance(error, grpc.Call) else "closed"
        return EtcdError(f"etcd at {self.endpoint} did not answer as wanted: {code}: {details}")


class Watch:
    """One stream of changes. Iterate it in one thread; call :meth:`tick` about once a second from another."""

    def __init__(self, client: EtcdClient, stub: Any, prefixes: Sequence[str], start_revision: int) -> None:
        self._client = client
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for prefix in prefixes:
            key = prefix.encode()
            create = MESSAGES["WatchCreate"](key=key, range_end=prefix_end(key), start_revision=start_revision)
            self._requests.put(MESSAGES["WatchRequest"](create_request=create))
        self._heard = time.monotonic()
        self._asked = False
        self._call = stub(iter(self._requests.get, None), metadata=METADATA)

    def __iter__(self) -> Iterator[tuple[Entry, ...]]:
        """Yield changes as they come. Raises :class:`EtcdError` at the end, which always comes: then list again."""
        try:
            for answer in self._call:
                self._heard, self._asked = time.monotonic(), False
                if answer.canceled:
                    message = f"etcd ended the watch: {answer.cancel_reason or f'compacted {answer.compact_revision}'}"
                    raise EtcdError(message)
                if answer.events:
                    yield tuple(_changed(event) for event in answer.events)
        except grpc.RpcError as error:
            raise self._client._error(error) from error  # noqa: SLF001 - of this module
        finally:
            self.cancel()

    def tick(self) -> None:
        """Ask for progress when nothing was heard for a while, and end the watch if that is not answered."""
        silent_s = time.monotonic() - self._heard
        if self._asked and silent_s > WATCH_IDLE_S + WATCH_PATIENCE_S:
            self.cancel()
        elif not self._asked and silent_s > WATCH_IDLE_S:
            self._asked = True
            request = MESSAGES["WatchRequest"]()
            request.progress_request.SetInParent()
            self._requests.put(request)

    def cancel(self) -> None:
        """End the watch. Any thread."""
        self._call.cancel()
        self._requests.put(None)


_RESPONSES = {
    "Range": "RangeResponse",
    "Txn": "TxnResponse",
    "LeaseGrant": "LeaseGrantResponse",
    "LeaseRevoke": "LeaseRevokeResponse",
}


def _bytes_of(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _entry(found: Any) -> Entry:
    return Entry(found.key.decode(errors="replace"), found.value, found.mod_revision)


def _changed(event: Any) -> Entry:
    found = _entry(event.kv)
    return Entry(found.key, None, found.revision) if event.type == DELETED else found


def _range(text: str, *, exact: bool = False, count_only: bool = False) -> Any:
    key = text.encode()
    end = b"" if exact else prefix_end(key)
    return MESSAGES["RequestOp"](request_range=MESSAGES["RangeRequest"](key=key, range_end=end, count_only=count_only))


def _put(key: str, value: bytes, lease: int) -> Any:
    return MESSAGES["RequestOp"](request_put=MESSAGES["PutRequest"](key=key.encode(), value=value, lease=lease))


def _delete(key: str) -> Any:
    return MESSAGES["RequestOp"](request_delete_range=MESSAGES["DeleteRequest"](key=key.encode()))
