"""The desired document of an instance name: what every instance of that name should keep, wherever it runs.

Documents come from outside and are data: their size is limited, and whatever is not exactly as described here is
refused whole. Fields of another name are kept when a document is rewritten, and change nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kvcached.arguments import check_limit
from kvcached.errors import KvcachedError
from kvcached.values import Bound

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 1
"""The only format of documents that this release applies."""

MAX_DOCUMENT_BYTES = 4096
MAX_RULES = 32
MAX_LABELS = 16
MAX_TEXT = 253
"""The longest text in a document, in characters: an id, a label, a note, a writer's name."""

MAX_SHARE = 2**64 - 1
"""The share at which every target takes the new rules."""

_SHARE_DIGITS = 16

Kind = TypeVar("Kind")


class DocumentError(KvcachedError, ValueError):
    """A document cannot be applied; the message says what in it is wrong."""


@dataclass(frozen=True)
class DesiredTokens:
    """A limit and a cap in tokens (-1 unlimited); None leaves that bound as it is."""

    limit_tokens: int | None = None
    cap_tokens: int | None = None

    def of(self, bound: Bound) -> int | None:
        """Return the tokens desired of ``bound``, None if it is left alone."""
        return self.cap_tokens if bound is Bound.CAP else self.limit_tokens

    def over(self, other: DesiredTokens) -> DesiredTokens:
        """Return these tokens, and where there are none those of ``other``."""
        limit = other.limit_tokens if self.limit_tokens is None else self.limit_tokens
        cap = other.cap_tokens if self.cap_tokens is None else self.cap_tokens
        return DesiredTokens(limit, cap)


@dataclass(frozen=True)
class LabelRule:
    """Other tokens for nodes that have all of these labels."""

    labels: Mapping[str, str]
    tokens: DesiredTokens


@dataclass(frozen=True)
class DesiredRules:
    """Tokens for all nodes, and rules for some; of those the first one that matches a node is used."""

    tokens: DesiredTokens
    where: tuple[LabelRule, ...] = ()

    def for_labels(self, labels: Mapping[str, str]) -> DesiredTokens:
        """Return the tokens for a node with these labels."""
        for rule in self.where:
            if rule.labels.items() <= labels.items():
                return rule.tokens.over(self.tokens)
        return self.tokens


@dataclass(frozen=True)
class Rollout:
    """How far a change has come: targets up to ``share`` take the new rules, the others ``previous``.

    ``previous`` is None where there was no document before: then the others keep what they have. ``state`` is
    ``running``, ``paused`` or ``done``, and ``why`` says what paused it.
    """

    id: str
    previous: DesiredRules | None
    share: int
    state: str = "running"
    why: str = ""


@dataclass(frozen=True)
class Desired:
    """A document: its unique ``id``, its rules, who wrote it when and why, and the roll-out it is part of, if any.

    ``fields`` is the JSON object that it was read from.
    """

    id: str
    rules: DesiredRules
    note: str = ""
    by: str = ""
    at: str = ""
    rollout: Rollout | None = None
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


def parse_document(text: bytes) -> Desired:
    """Parse a document. Raises :class:`DocumentError` with what is wrong in it; pure, may be called from any thread."""
    if len(text) > MAX_DOCUMENT_BYTES:
        message = f"the document has {len(text)} bytes, more than {MAX_DOCUMENT_BYTES}"
        raise DocumentError(message)
    return desired_of(parse_object(text))


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse one JSON object in which no name is given twice. Raises :class:`DocumentError`."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, DocumentError):
            raise
        where = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        message = f"the document is not JSON{where}"
        raise DocumentError(message) from error
    return _object(found, "the document")


def desired_of(fields: Mapping[str, Any]) -> Desired:
    """Return the document that a JSON object says. Raises :class:`DocumentError`."""
    if _whole(fields.get("format"), "format") != FORMAT:
        message = f"the document has format {fields['format']}; this release applies format {FORMAT}: upgrade it"
        raise DocumentError(message)
    rollout = fields.get("rollout")
    return Desired(
        id=_text(fields, "id"),
        rules=_rules(fields, "the document"),
        note=_text(fields, "note", ""),
        by=_text(fields, "by", ""),
        at=_text(fields, "at", ""),
        rollout=None if rollout is None else _rollout(_object(rollout, "rollout")),
        fields=fields,
    )


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return the bytes of a document that :func:`parse_document` accepts. Raises :class:`DocumentError` otherwise."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    parse_document(text)
    return text


def rules_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a document's JSON object that its rules are made of, as ``previous`` has it."""
    return {name: fields[name] for name in ("limit_tokens", "cap_tokens", "where") if name in fields}


def share_text(share: int) -> str:
    """Return a share as documents write it."""
    return f"{share:0{_SHARE_DIGITS}x}"


def _rules(fields: Mapping[str, Any], what: str) -> DesiredRules:
    tokens = _tokens(fields, what)
    where = _list(fields.get("where", []), "where")
    if len(where) > MAX_RULES:
        message = f"where has {len(where)} rules, more than {MAX_RULES}"
        raise DocumentError(message)
    return DesiredRules(tokens, tuple(map(_label_rule, where)))


def _tokens(fields: Mapping[str, Any], what: str) -> DesiredTokens:
    found = DesiredTokens(*(_bound(fields, name) for name in ("limit_tokens", "cap_tokens")))
    if found == DesiredTokens():
        message = f"{what} has neither limit_tokens nor cap_tokens"
        raise DocumentError(message)
    return found


def _bound(fields: Mapping[str, Any], name: str) -> int | None:
    if name not in fields:
        return None
    try:
        return check_limit(fields[name])
    except (TypeError, ValueError) as error:
        raise DocumentError(str(error).replace("limit_tokens", name, 1)) from error


def _label_rule(value: object) -> LabelRule:
    rule = _object(value, "a rule in where")
    labels = _object(rule.get("labels"), "labels")
    if not labels or len(labels) > MAX_LABELS:
        message = f"a rule in where has {len(labels)} labels; give 1 to {MAX_LABELS}"
        raise DocumentError(message)
    return LabelRule({_short(name, "a label"): _text(labels, name) for name in labels}, _tokens(rule, "a rule"))


def _rollout(fields: Mapping[str, Any]) -> Rollout:
    previous, share, state = fields.get("previous"), _text(fields, "share"), _text(fields, "state", "running")
    if len(share) != _SHARE_DIGITS or not set(share) <= set("0123456789abcdef"):
        message = f"rollout.share is {share!r}, not {_SHARE_DIGITS} hex digits"
        raise DocumentError(message)
    if state not in {"running", "paused", "done"}:
        message = f"rollout.state is {state!r}, not running, paused or done"
        raise DocumentError(message)
    return Rollout(
        id=_text(fields, "id"),
        previous=None if previous is None else _rules(_object(previous, "rollout.previous"), "rollout.previous"),
        share=int(share, 16),
        state=state,
        why=_text(fields, "why", ""),
    )


def _object(value: object, what: str) -> dict[str, Any]:
    return _typed(value, dict, what, "an object")


def _list(value: object, what: str) -> list[Any]:
    return _typed(value, list, what, "a list")


def _whole(value: object, what: str) -> int:
    if isinstance(value, bool):
        value = None
    return _typed(value, int, what, "a whole number")


def _typed(value: object, kind: type[Kind], what: str, name: str) -> Kind:
    if not isinstance(value, kind):
        message = f"{what} is not {name}"
        raise DocumentError(message)
    return value


def _text(fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
    return _short(fields.get(name, default), name)


def _short(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        message = f"{name} is not one line of text of at most {MAX_TEXT} characters"
        raise DocumentError(message)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        message = "the document gives a name twice"
        raise DocumentError(message)
    return found


def _no_constant(_text: str) -> None:
    message = "the document has a number that is not finite"
    raise DocumentError(message)
