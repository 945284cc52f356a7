"""What operators write: documents made from the ones that are there, and what became of the writing. Pure."""

from __future__ import annotations

import datetime
import getpass
import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcached.fleet.document import FORMAT, DocumentError, rules_fields, share_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcached.values import Bound


@dataclass(frozen=True)
class WriteOutcome:
    """What became of a write: its ``revision``, or 0 and the revision that is ``stored`` instead.

    ``failed``: the store did not take it, and it was not there when read back. ``unknown``: the answer was lost, and it
    could not be found out what the write did.
    """

    revision: int
    stored: int
    unknown: bool = False
    failed: bool = False
    reason: str = ""


def with_tokens(
    fields: Mapping[str, Any] | None, bound: Bound, tokens: int, labels: Mapping[str, str], note: str
) -> dict[str, Any]:
    """Return a document with other tokens of ``bound`` for all nodes, or for those with ``labels`` if any are given.

    What else the document says is kept, apart from a roll-out. Raises :class:`DocumentError` where labels are given and
    there is nothing yet that holds for all nodes.
    """
    name = f"{bound.value}_tokens"
    kept = {key: value for key, value in (fields or {}).items() if key != "rollout"}
    rules = [dict(rule) for rule in kept.get("where", [])]
    if labels:
        if not kept:
            message = "there is no document yet; set a limit for all nodes first, then one for some"
            raise DocumentError(message)
        same = next((rule for rule in rules if rule.get("labels") == dict(labels)), None)
        if same is None:
            rules.insert(0, {"labels": dict(labels), name: tokens})
        else:
            same[name] = tokens
    else:
        kept[name] = tokens
        rules = [rule for rule in (_without(rule, name) for rule in rules) if len(rule) > 1]
    return signed({**kept, "where": rules}, note)


def _without(rule: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in rule.items() if key != name}


def with_rollout(
    fields: Mapping[str, Any], previous: Mapping[str, Any] | None, waves: Sequence[float], max_failed: int
) -> dict[str, Any]:
    """Return a document as the beginning of a roll-out, in which nobody is new yet."""
    before = None if previous is None else rules_fields(previous)
    rollout = {"id": secrets.token_hex(8), "previous": before, "share": share_text(0), "state": "running", "why": ""}
    return {**fields, "rollout": {**rollout, "waves": list(waves), "max_failed": max_failed}}


def advanced(fields: Mapping[str, Any], *, share: int | None = None, state: str, why: str = "") -> dict[str, Any]:
    """Return a document in roll-out with another share, state and reason; its share never becomes smaller."""
    rollout = dict(fields["rollout"])
    if share is not None:
        rollout["share"] = share_text(max(share, int(rollout["share"], 16)))
    return {**fields, "rollout": {**rollout, "state": state, "why": why[:200]}}


def rolled_back(fields: Mapping[str, Any], note: str) -> dict[str, Any] | None:
    """Return the document before a roll-out, None if there was none. Raises :class:`DocumentError` without roll-out."""
    rollout = fields.get("rollout")
    if rollout is None:
        message = "the document is in no roll-out; set the value that you want"
        raise DocumentError(message)
    kept = {key: value for key, value in fields.items() if key not in {*rules_fields(fields), "rollout"}}
    return None if rollout["previous"] is None else signed({**kept, **rollout["previous"]}, note)


def signed(fields: Mapping[str, Any], note: str) -> dict[str, Any]:
    """Return a document with a new id, and who wrote it, when and why."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {**fields, "format": FORMAT, "id": secrets.token_hex(8), "note": note, "by": _writer(), "at": now}


def _writer() -> str:
    """Return who is writing, as far as that can be told; a claim, not a proof."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:100]
