"""Where a fleet's documents are kept, as people write it: ``file:PATH`` or ``etcds://HOST:PORT[,HOST:PORT...]/NAME``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvcached.errors import KvcachedError
from kvcached.settings import is_instance_name

FLEET_VARIABLE = "KVCACHED_FLEET"

FORMS = "write file:PATH or etcds://HOST:PORT[,HOST:PORT...]/NAME"

_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_LOOPBACK = re.compile(r"localhost|127(\.[0-9]{1,3}){3}|\[::1\]")


class FleetUrlError(KvcachedError, ValueError):
    """A fleet's URL cannot be used; the message says what to write instead."""


@dataclass(frozen=True)
class FleetUrl:
    """A fleet: ``path`` of a file, or ``endpoints`` (HOST:PORT) of an etcd and the fleet's ``name`` in it."""

    path: str = ""
    name: str = ""
    endpoints: tuple[str, ...] = ()
    tls: bool = True


def parse_fleet_url(text: str | None) -> FleetUrl:
    """Parse a fleet's URL. Raises :class:`FleetUrlError`; nothing is opened."""
    if not text:
        message = f"no fleet is given; use --fleet or {FLEET_VARIABLE}, and {FORMS}"
        raise FleetUrlError(message)
    scheme, _, rest = text.partition(":")
    if scheme == "file" and rest:
        return FleetUrl(path=rest)
    if scheme not in {"etcd", "etcds"} or not rest.startswith("//"):
        message = f"{text!r} is not a fleet; {FORMS}"
        raise FleetUrlError(message)
    hosts, _, name = rest[2:].rstrip("/").partition("/")
    if not is_instance_name(name):
        message = f"{text!r} ends in no fleet name of A-Z a-z 0-9 . _ -; {FORMS}"
        raise FleetUrlError(message)
    endpoints = tuple(hosts.split(","))
    for endpoint in endpoints:
        _check(endpoint, tls=scheme == "etcds")
    return FleetUrl(name=name, endpoints=endpoints, tls=scheme == "etcds")


def _check(endpoint: str, *, tls: bool) -> None:
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None:
        message = f"{endpoint!r} is not HOST:PORT; {FORMS}"
        raise FleetUrlError(message)
    if not tls and _LOOPBACK.fullmatch(found[1]) is None:
        message = f"etcd:// without TLS is for loopback only, not for {found[1]}; use etcds://"
        raise FleetUrlError(message)
