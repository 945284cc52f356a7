"""A fleet as operators see it: documents, live agents, statuses and holds, all read at one revision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcached.fleet.decide import NEW, position
from kvcached.fleet.target_status import TargetState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcached.fleet.document import Desired
    from kvcached.fleet.store import Hold, Stored
    from kvcached.fleet.target_status import TargetStatus


@dataclass(frozen=True)
class FleetTarget:
    """One instance on one node, and what the node's agent says of it."""

    node: str
    instance: str
    status: TargetStatus

    @property
    def is_alive(self) -> bool:
        """Whether an engine of this name lives there."""
        return self.status.state != TargetState.ABSENT.value

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"node": self.node, "instance": self.instance, **self.status.to_dict()}


@dataclass(frozen=True)
class FleetView:
    """A fleet at one revision of its store. ``agents`` are the live nodes with what they say of themselves."""

    revision: int
    documents: Mapping[str, Stored] = field(default_factory=dict)
    agents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    targets: tuple[FleetTarget, ...] = ()
    holds: Mapping[tuple[str, str], Hold] = field(default_factory=dict)

    def live(self, instance: str) -> tuple[FleetTarget, ...]:
        """Return the targets of an instance name whose engines live."""
        return tuple(one for one in self.targets if one.instance == instance and one.is_alive)

    @property
    def names(self) -> list[str]:
        """All instance names that have a document or a live engine, sorted."""
        return sorted({*self.documents, *(one.instance for one in self.targets if one.is_alive)})


def is_new(desired: Desired, target: FleetTarget) -> bool:
    """Return whether a target takes a document's new rules."""
    rollout = desired.rollout
    return rollout is None or position(rollout.id, target.node, target.instance) <= rollout.share


def has_applied(target: FleetTarget, revision: str) -> bool:
    """Return whether a target has acted on this revision and its engine holds to it."""
    status = target.status
    done = status.state == TargetState.APPLIED.value and status.share in {"", NEW}
    return status.observed == revision and (done or status.state == TargetState.ON_HOLD.value)
