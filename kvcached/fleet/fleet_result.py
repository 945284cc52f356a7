"""What became of a write to a fleet, as the command line tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcached.ledger.results import PublicationStatus

if TYPE_CHECKING:
    from kvcached.fleet.fleet_view import FleetTarget
    from kvcached.fleet.fleet_waiting import FleetWait


@dataclass(frozen=True)
class FleetResult:
    """A write of one document: its status as of a publication, its revision, and what waiting showed, if it was waited.

    ``stored`` is the revision that decides where this write did not. ``rollout`` is how a roll-out ended.
    """

    status: PublicationStatus
    instance_name: str
    bound: str
    limit_tokens: int
    revision: int = 0
    stored: int = 0
    unchanged: bool = False
    warnings: tuple[str, ...] = ()
    wait: FleetWait | None = None
    rollout: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the document is stored."""
        return self.status is PublicationStatus.ACCEPTED

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with the fields of a local publication where they have a meaning."""
        fields: dict[str, Any] = {
            "status": self.status.value,
            "instance_name": self.instance_name,
            "bound": self.bound,
            "limit_tokens": self.limit_tokens,
            "revision": self.revision,
            "accepted": self.accepted,
            "unchanged": self.unchanged,
            "warnings": list(self.warnings),
        }
        if self.rollout:
            fields["rollout"] = self.rollout
        if self.wait is not None:
            fields["applied"] = self.wait.succeeded and not self.rollout.startswith("paused")
            fields["waited_s"] = self.wait.waited_s
            fields["rejections"] = [_refusal(one) for one in self.wait.refusing]
            fields["lagging"] = [one.node for one in self.wait.lagging]
            fields["lost"] = [one.node for one in self.wait.lost]
            fields["targets"] = [one.to_dict() for one in self.wait.applied]
        return fields


def _refusal(target: FleetTarget) -> dict[str, str]:
    return {"node": target.node, "reason": f"{target.status.state}: {target.status.reason}"}
