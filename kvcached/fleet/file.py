"""Documents in a file, as a ConfigMap volume or a configuration tool replaces it: ``{"instances": {NAME: DOCUMENT}}``.

The file is replaced whole by a rename, of itself or of a folder on its path. What cannot be read or is not valid
changes nothing: the last valid file holds. The statuses are written to another file, if one was named.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from typing import TYPE_CHECKING

from kvcached.fleet.document import DocumentError, desired_of, encode, parse_object
from kvcached.fleet.store import Stored, Wishes
from kvcached.settings import check_instance_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from kvcached.fleet.target_status import TargetStatus

MAX_FILE_BYTES = 2**20
"""The largest file that is read: what a ConfigMap can hold."""

FRESH_S = 1.0
"""For how long after a change a file is read again, in seconds: a second change may carry the same time."""

REVISION_DIGITS = 12

_log = logging.getLogger(__name__)


class FileSource:
    """A source for an agent. A document's revision is a digest of what it says."""

    def __init__(self, path: str, node: str, status_path: str | None = None) -> None:
        self._path = path
        self._node = node
        self._status_path = status_path
        self._wishes = Wishes()
        self._stamp: tuple[int, ...] = ()
        self._read_at = 0.0
        self._written: bytes = b""

    def start(self, wake: Callable[[], None]) -> None:
        """Do nothing: the agent's rounds are frequent enough, and a file rings no bell."""

    def read(self) -> Wishes:
        """Return what the last valid file says, after a look whether there is a newer one."""
        try:
            stamp = _stamp(self._path)
            settled = abs(time.time() - stamp[0] / 1e9) > FRESH_S
            if stamp == self._stamp and settled and not self._wishes.fault:
                return self._wishes
            self._wishes = Wishes(_parse(_content(self._path)), known=True)
            self._stamp = stamp
        except (OSError, DocumentError) as error:
            self._stamp = ()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            fault = f"{self._path} cannot be used: {reason}; the last valid documents hold"
            self._wishes = Wishes(self._wishes.documents, self._wishes.holds, self._wishes.known, fault)
        return self._wishes

    def report(self, statuses: Mapping[str, TargetStatus]) -> None:
        """Replace the status file if the statuses changed."""
        if self._status_path is None:
            return
        targets = {name: status.to_dict() for name, status in sorted(statuses.items())}
        text = json.dumps({"node": self._node, "fault": self._wishes.fault, "targets": targets}).encode()
        if text == self._written:
            return
        try:
            _replace(self._status_path, text)
        except OSError as error:
            _log.warning("status file %s cannot be written: %s", self._status_path, error.strerror)
        self._written = text

    def close(self) -> None:
        """Do nothing: no file is open between two rounds."""


def _stamp(path: str) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_ino, status.st_dev, status.st_size, status.st_ctime_ns


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        message = f"it has more than {MAX_FILE_BYTES} bytes"
        raise DocumentError(message)
    return text


def _parse(text: bytes) -> dict[str, Stored]:
    """Return the documents of a file. One that is not valid refuses the file: a change is taken whole."""
    instances = parse_object(text).get("instances")
    if not isinstance(instances, dict):
        message = "the file has no object named instances"
        raise DocumentError(message)
    return {_name(name): _stored(name, fields) for name, fields in instances.items()}


def _name(name: str) -> str:
    try:
        return check_instance_name(name)
    except ValueError as error:
        raise DocumentError(str(error)) from error


def _stored(name: str, fields: object) -> Stored:
    if not isinstance(fields, dict):
        message = f"the document of {name} is not an object"
        raise DocumentError(message)
    whole: dict[str, Any] = {"format": 1, "id": "", **fields}
    try:
        digest = hashlib.sha256(encode({**whole, "id": "", "at": ""})).hexdigest()[:REVISION_DIGITS]
        return Stored(digest, desired_of({**whole, "id": whole["id"] or digest}))
    except DocumentError as error:
        message = f"the document of {name}: {error}"
        raise DocumentError(message) from error


def _replace(path: str, text: bytes) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(text)
    os.replace(temporary, path)
