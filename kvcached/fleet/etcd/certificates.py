"""The TLS files of a client of etcd, as the environment names them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from kvcached.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

CA_VARIABLE = "KVCACHED_FLEET_CA"
CERT_VARIABLE = "KVCACHED_FLEET_CERT"
KEY_VARIABLE = "KVCACHED_FLEET_KEY"


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files: of the authority of etcd's certificate (empty: the system's), and of one's own, if any."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def credentials(self) -> Any:
        """Read the files. Raises :class:`SettingsError` naming the one that cannot be read."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


def certificates_of(environ: Mapping[str, str] | None = None) -> Certificates:
    """Return what the environment says; nothing is read yet."""
    environ = os.environ if environ is None else environ
    return Certificates(*(environ.get(name, "") for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE)))


def _read(path: str) -> bytes | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}; {CA_VARIABLE}, {CERT_VARIABLE}, {KEY_VARIABLE} name files"
        raise SettingsError(message) from error
