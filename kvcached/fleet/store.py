"""What an agent needs of a place where documents are kept. Agents know nothing else of etcd or of files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvcached.fleet.document import DocumentError, parse_document, parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcached.fleet.document import Desired
    from kvcached.fleet.target_status import TargetStatus


@dataclass(frozen=True)
class Stored:
    """A document as it was read, or why it cannot be applied; ``revision`` is compared for equality only."""

    revision: str
    desired: Desired | None
    error: DocumentError | None = None


@dataclass(frozen=True)
class Hold:
    """An operator's wish to leave one target alone. ``until`` is a Unix time in seconds, None for good."""

    note: str = ""
    until: float | None = None


def stored_of(revision: str, text: bytes) -> Stored:
    """Return a document as it was read; one that cannot be applied is a value as well."""
    try:
        return Stored(revision, parse_document(text))
    except DocumentError as error:
        return Stored(revision, None, error)


def hold_of(text: bytes) -> Hold:
    """Return what a hold says. One that cannot be understood holds for good: leaving alone is the safe side."""
    try:
        fields = parse_object(text)
    except DocumentError:
        return Hold("a hold that cannot be read")
    note, until = fields.get("note", ""), fields.get("until")
    is_time = isinstance(until, (int, float)) and not isinstance(until, bool)
    return Hold(note if isinstance(note, str) else "", until if is_time else None)


@dataclass(frozen=True)
class Wishes:
    """What a source holds: a document for each instance name, and holds of this node.

    ``known`` is False until the source was read once: an agent that knows nothing does nothing. ``fault`` says why
    what is here may be old, empty while the source is in reach.
    """

    documents: Mapping[str, Stored] = field(default_factory=dict)
    holds: Mapping[str, Hold] = field(default_factory=dict)
    known: bool = False
    fault: str = ""


class DocumentSource(Protocol):
    """A place where documents are kept, as an agent follows it. All calls come from the agent's own thread."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to follow; ``wake`` may be called from any thread whenever :meth:`read` would differ."""

    def read(self) -> Wishes:
        """Return what is known now. Never blocks on a network, never raises."""

    def report(self, statuses: Mapping[str, TargetStatus]) -> None:
        """Take the statuses of all targets of this node, to be written where they changed. Never blocks or raises."""

    def close(self) -> None:
        """Stop following and reporting."""
