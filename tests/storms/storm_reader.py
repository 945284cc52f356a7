"""The readers of a storm: words only rise, and one revision means one limit everywhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from storm_record import GPUS, Shared

from kvcached.ledger.instances import get_instances

if TYPE_CHECKING:
    from kvcached.ledger.instances import ReplicaStatus


def run_reader(ledger_dir: str, shared: Shared) -> None:
    """Look at the instance again and again: words only rise, and a revision means one limit."""
    limits: dict[int, int] = {}
    newest = dict.fromkeys(GPUS, 0)
    applied, split = 0, False
    while True:
        (status,) = [instance for instance in get_instances(ledger_dir) if instance.name == "target"] or [None]
        if status is None or len(status.replicas[0].members) != len(GPUS):
            shared.violate(f"the live instance was not seen whole: {status}")
            continue
        replica = status.replicas[0]
        check_members(replica, newest, limits, shared)
        if replica.applied.revision < applied:
            shared.violate(f"applied went back from {applied} to {replica.applied.revision}")
        if limits.get(replica.applied.revision, replica.applied.limit_tokens) != replica.applied.limit_tokens:
            shared.violate(f"{replica.applied} was applied, which was never published")
        applied = replica.applied.revision
        if replica.split and not split:
            shared.add("splits")
        if split and not replica.split:
            shared.add("healed")
        split = replica.split
        shared.add("looks")
        time.sleep(0.002)
        for revision in [revision for revision in limits if revision < min(newest.values()) - 100]:
            del limits[revision]


def check_members(replica: ReplicaStatus, newest: dict[str, int], limits: dict[int, int], shared: Shared) -> None:
    """Check that no word went back, and that no revision has two limits."""
    for member in replica.members:
        if member.revision < newest[member.gpu]:
            shared.violate(f"{member.gpu} went back from revision {newest[member.gpu]} to {member.revision}")
        newest[member.gpu] = member.revision
        if limits.setdefault(member.revision, member.limit_tokens) != member.limit_tokens:
            shared.violate(f"revision {member.revision} has two limits")
