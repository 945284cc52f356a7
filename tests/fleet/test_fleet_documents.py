"""Desired documents: what is accepted, what is refused, and what they say to a target."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.fleet.bounds import NodeBounds
from kvcached.fleet.decide import NEW, PREVIOUS, decide, share_for, wave_size
from kvcached.fleet.document import (
    MAX_SHARE,
    Desired,
    DesiredTokens,
    DocumentError,
    desired_of,
    encode,
    parse_document,
    share_text,
)
from kvcached.fleet.fleet_url import FleetUrlError, parse_fleet_url
from kvcached.values import MAX_LIMIT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

LABELS = st.dictionaries(st.sampled_from(["gpu", "zone", "tier"]), st.sampled_from(["a", "b"]), max_size=3)
TOKENS = st.integers(-1, MAX_LIMIT_TOKENS)
BOUNDS = st.fixed_dictionaries({}, optional={"limit_tokens": TOKENS, "cap_tokens": TOKENS}).filter(bool)
RULE = st.builds(lambda labels, tokens: {"labels": labels, **tokens}, LABELS.filter(bool), BOUNDS)
RULES = st.builds(lambda tokens, where: {**tokens, "where": where}, BOUNDS, st.lists(RULE, max_size=4))
SHARES = st.integers(0, MAX_SHARE)
NODES = st.text("abc123", min_size=1, max_size=6)


def document(rules: Mapping[str, Any], previous: Mapping[str, Any] | None, share: int) -> Desired:
    rollout = {"id": "r", "previous": previous, "share": share_text(share)}
    return parse_document(encode({"format": 1, "id": "x", **rules, "rollout": rollout}))


@settings(max_examples=80, deadline=None)
@given(RULES, st.none() | RULES, SHARES, SHARES, LABELS, NODES)
def test_decisions_are_total_deterministic_and_monotone_in_the_share(
    rules: dict[str, Any],
    previous: dict[str, Any] | None,
    one: int,
    other: int,
    labels: dict[str, str],
    node: str,
) -> None:
    """Every document decides for every target, always alike, and a larger share never moves a target back."""
    less, more = sorted((one, other))
    before, after = (document(rules, previous, share) for share in (less, more))
    decision = decide(before, labels, node, "chat")
    assert decision == decide(document(rules, previous, less), dict(reversed(labels.items())), node, "chat")
    assert decision.share == PREVIOUS or decide(after, labels, node, "chat").share == NEW
    assert decide(document(rules, previous, MAX_SHARE), labels, node, "chat").share == NEW
    assert decide(document(rules, previous, 0), labels, node, "chat").share == PREVIOUS
    if decision.share == PREVIOUS and previous is None:
        assert decision.tokens is None
    else:
        assert decision.tokens is not None
        assert decision.tokens != DesiredTokens()


@settings(max_examples=60, deadline=None)
@given(st.sets(NODES, min_size=1, max_size=40), st.floats(0.1, 100))
def test_a_wave_has_exactly_its_targets(nodes: set[str], percent: float) -> None:
    """The share for a wave makes as many targets new as the wave has, and at least one."""
    targets = [(node, "chat") for node in sorted(nodes)]
    count = wave_size(percent, len(targets))
    desired = document({"limit_tokens": 1}, {"limit_tokens": 2}, share_for("r", targets, count))
    assert sum(decide(desired, {}, node, name).share == NEW for node, name in targets) == count >= 1


def test_the_first_rule_that_matches_a_node_is_used() -> None:
    """A node with the labels of two rules takes the first, and what the rule leaves out from the document."""
    desired = desired_of(
        {
            "format": 1,
            "id": "x",
            "limit_tokens": 16000,
            "cap_tokens": 64000,
            "where": [
                {"labels": {"gpu": "A100"}, "limit_tokens": 8000},
                {"labels": {"gpu": "A100", "zone": "b"}, "limit_tokens": 1},
            ],
        }
    )
    found = decide(desired, {"gpu": "A100", "zone": "b"}, "n1", "chat")
    assert found.tokens == DesiredTokens(8000, 64000)
    assert decide(desired, {"gpu": "H100"}, "n1", "chat").tokens == DesiredTokens(16000, 64000)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "not an object"),
        ("{", "not JSON"),
        ("[" * 4000, "not JSON"),
        ('{"format":1,"id":"x","limit_tokens":NaN}', "not finite"),
        ('{"format":1,"id":"x","limit_tokens":1,"limit_tokens":2}', "twice"),
        ('{"format":1,"id":"x"}', "neither"),
        ('{"format":2,"id":"x","limit_tokens":1}', "upgrade"),
        ('{"format":true,"id":"x","limit_tokens":1}', "format is not"),
        ('{"format":1,"id":"x","limit_tokens":true}', "must be an int"),
        ('{"format":1,"id":"x","limit_tokens":1.5}', "must be an int"),
        ('{"format":1,"id":"x","cap_tokens":-2}', "cap_tokens must be"),
        ('{"format":1,"id":7,"limit_tokens":1}', "id is not one line"),
        ('{"format":1,"id":"x","limit_tokens":1,"note":"\\u001b[31m"}', "note is not one line"),
        ('{"format":1,"id":"x","limit_tokens":1,"where":[{"labels":{},"limit_tokens":1}]}', "0 labels"),
        ('{"format":1,"id":"x","limit_tokens":1,"where":[{"labels":{"a":"b"}}]}', "neither"),
        ('{"format":1,"id":"x","limit_tokens":1,"rollout":{"id":"r","share":"ff"}}', "hex digits"),
        (f'{{"format":1,"id":"{"x" * 5000}"}}', "bytes"),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_document_is_refused_with_the_reason(text: str, why: str) -> None:
    """Each kind of nonsense is refused, and the message says what is wrong."""
    with pytest.raises(DocumentError, match=why):
        parse_document(text.encode())


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60) | st.lists(st.none() | st.integers() | st.text(max_size=5), max_size=3).map(json.dumps))
def test_bytes_from_outside_are_a_document_or_an_error(data: bytes | str) -> None:
    """Whatever is read, nothing but the documented error is raised."""
    with pytest.raises(DocumentError):
        parse_document(data if isinstance(data, bytes) else data.encode(errors="replace"))


def test_fields_of_other_releases_are_kept() -> None:
    """A field that this release does not know survives the reading and the writing of a document."""
    fields = {"format": 1, "id": "x", "limit_tokens": 1, "owner": "team-a"}
    assert parse_document(encode(parse_document(encode(fields)).fields)).fields["owner"] == "team-a"


@pytest.mark.parametrize(
    ("bounds", "tokens", "refused"),
    [
        (NodeBounds(), DesiredTokens(-1, 0), ""),
        (NodeBounds(min_limit=1000), DesiredTokens(999), "--min-limit"),
        (NodeBounds(max_limit=1000), DesiredTokens(-1), "--max-limit"),
        (NodeBounds(max_limit=1000), DesiredTokens(None, -1), ""),
        (NodeBounds(min_cap=1000), DesiredTokens(1, 10), "--min-cap"),
    ],
)
def test_a_node_refuses_what_is_outside_its_bounds(bounds: NodeBounds, tokens: DesiredTokens, refused: str) -> None:
    """Unlimited is more than any maximum, a bound that is left alone is within, and the option is named."""
    assert refused in bounds.refusal(tokens)
    assert bool(refused) == bool(bounds.refusal(tokens))


@pytest.mark.parametrize(
    "text", [None, "", "chat", "file:", "etcds:h:1/x", "etcds://h/x", "etcds://h:1/", "etcd://h:1/x", "etcds://h:1,/x"]
)
def test_what_is_no_fleet_url_is_refused(text: str | None) -> None:
    """A URL that is incomplete, or that would send documents through a network in plain, is refused."""
    with pytest.raises(FleetUrlError):
        parse_fleet_url(text)
    assert parse_fleet_url("etcd://127.0.0.1:2379,[::1]:2379/prod").endpoints == ("127.0.0.1:2379", "[::1]:2379")
