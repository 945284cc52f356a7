"""Where a fleet's keys are in etcd. The node comes before the instance, so that a role can be for one node alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FleetKeys:
    """The keys of one fleet."""

    fleet: str

    @property
    def root(self) -> str:
        """The prefix of all of them."""
        return f"/kvcached/{self.fleet}/"

    @property
    def desired(self) -> str:
        """The prefix of the documents, one for each instance name."""
        return f"{self.root}desired/"

    @property
    def agents(self) -> str:
        """The prefix of the live agents, one for each node, under its lease."""
        return f"{self.root}agents/"

    @property
    def statuses(self) -> str:
        """The prefix of all statuses, NODE/INSTANCE, under the leases of their agents."""
        return f"{self.root}status/"

    @property
    def holds(self) -> str:
        """The prefix of all holds, NODE/INSTANCE."""
        return f"{self.root}holds/"

    def statuses_of(self, node: str) -> str:
        """Return the prefix of one node's statuses."""
        return f"{self.statuses}{node}/"

    def holds_of(self, node: str) -> str:
        """Return the prefix of one node's holds."""
        return f"{self.holds}{node}/"
