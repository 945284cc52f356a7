"""What an agent says of one target: one instance in the ledger directory of its node."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kvcached.fleet.document import DocumentError, parse_object
from kvcached.values import TextEnum

MAX_STATUS_BYTES = 4096


class TargetState(TextEnum):
    """What became of a document on one target; the values of engines' outcomes are states as well.

    ``on_hold``: an operator's hold leaves it alone. ``contested``: somebody else publishes on this node, and the
    fleet's tokens are published again after a pause. ``refused_by_node``: outside the bounds that this agent was
    started with. ``unsupported_document``: of a newer format, or not valid. ``unmanaged``: no document says anything.
    """

    APPLIED = "applied"
    APPLYING = "applying"
    ABSENT = "absent"
    UNMANAGED = "unmanaged"
    ON_HOLD = "on_hold"
    CONTESTED = "contested"
    REFUSED_BY_NODE = "refused_by_node"
    UNSUPPORTED_DOCUMENT = "unsupported_document"
    PARTIAL = "partial"
    UNAVAILABLE = "unavailable"


REFUSALS = frozenset({"refused_by_node", "unsupported_document", "unsupported_engine"})
"""The states in which a target will not apply a document, beside those that begin with ``rejected_``."""


@dataclass(frozen=True)
class TargetStatus:
    """What became of a document on one target.

    ``observed`` is the store's revision of the document that the agent last acted on, and ``id`` the document's; both
    are empty without one. Revisions of the ledger are 0 before the first publication. ``share`` says which rules of a
    roll-out were taken, ``new`` or ``previous``. Statuses are equal if they say the same, whenever they were written.
    """

    state: str
    observed: str = ""
    id: str = ""
    limit_tokens: int | None = None
    cap_tokens: int | None = None
    ledger_revision: int = 0
    cap_revision: int = 0
    incarnation: str = ""
    replicas: int = 0
    reason: str = ""
    share: str = ""

    @property
    def refuses(self) -> bool:
        """Whether this target will not apply the document: waiting for it is pointless."""
        return self.state in REFUSALS or self.state.startswith("rejected_")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def encode_status(status: TargetStatus) -> bytes:
    """Return the bytes of a status; a long reason is cut."""
    return json.dumps({**status.to_dict(), "reason": status.reason[:500]}, separators=(",", ":")).encode()


def parse_status(text: bytes) -> TargetStatus:
    """Parse a status; fields of other releases are passed over. Raises :class:`DocumentError`."""
    if len(text) > MAX_STATUS_BYTES:
        message = f"the status has {len(text)} bytes, more than {MAX_STATUS_BYTES}"
        raise DocumentError(message)
    found = parse_object(text)
    known = {name: found[name] for name in TargetStatus.__dataclass_fields__ if name in found}
    if not isinstance(known.get("state"), str) or not isinstance(known.get("observed", ""), str):
        message = "the status has no state, or an observed revision that is no text"
        raise DocumentError(message)
    return TargetStatus(**known)
