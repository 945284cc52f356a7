"""What a document says to one target. Pure: documents, labels and names in, tokens out; no clock and no file.

During a roll-out each target has a *position*, a stable hash of the roll-out's id, its node and its name. It takes the
new rules if its position is at most the document's share, so that all agents agree who is new, and raising the share
never moves a target back. The id is in the hash, so that it is not always the same node that comes first.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.fleet.document import MAX_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvcached.fleet.document import Desired, DesiredTokens

NEW, PREVIOUS = "new", "previous"


@dataclass(frozen=True)
class NodeDecision:
    """The tokens for one target, None if it keeps what it has; ``share`` says whose rules they are from."""

    tokens: DesiredTokens | None
    share: str


def decide(desired: Desired, labels: Mapping[str, str], node: str, instance: str) -> NodeDecision:
    """Return what a document says to an instance on a node with these labels."""
    rollout = desired.rollout
    if rollout is None or position(rollout.id, node, instance) <= rollout.share:
        return NodeDecision(desired.rules.for_labels(labels), NEW)
    return NodeDecision(None if rollout.previous is None else rollout.previous.for_labels(labels), PREVIOUS)


def position(rollout_id: str, node: str, instance: str) -> int:
    """Return a target's place in a roll-out: 1 to 2^64 - 1, so that a share of 0 is nobody."""
    place = f"{rollout_id}\0{node}\0{instance}"
    digest = hashlib.sha256(place.encode(errors="surrogateescape")).digest()
    return max(1, int.from_bytes(digest[:8], "big"))


def share_for(rollout_id: str, targets: Iterable[tuple[str, str]], count: int) -> int:
    """Return the share at which exactly ``count`` of these targets (node, instance) are new; all others at the most."""
    positions = sorted(position(rollout_id, node, instance) for node, instance in targets)
    if count <= 0:
        return 0
    return MAX_SHARE if count >= len(positions) else positions[count - 1]


def wave_size(percent: float, targets: int) -> int:
    """Return how many of so many targets a wave of ``percent`` has: at least one."""
    return min(targets, max(1, -int(-targets * percent // 100)))
