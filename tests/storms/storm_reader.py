"""The readers of a storm: words only rise, and one revision means one limit everywhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from storm_record import GPUS, Shared

from kvcached.ledger.instances import get_instances
from kvcached.values import Bound, Update

if TYPE_CHECKING:
    from kvcached.ledger.instances import ReplicaStatus


def run_reader(ledger_dir: str, shared: Shared) -> None:
    """Look at the instance again and again: words only rise, and a revision of a bound means one number."""
    limits: dict[Bound, dict[int, int]] = {bound: {} for bound in Bound}
    newest = {bound: dict.fromkeys(GPUS, 0) for bound in Bound}
    applied, split = dict.fromkeys(Bound, 0), False
    while True:
        (status,) = [instance for instance in get_instances(ledger_dir) if instance.name == "target"] or [None]
        if status is None or len(status.replicas[0].members) != len(GPUS):
            shared.violate(f"the live instance was not seen whole: {status}")
            continue
        replica = status.replicas[0]
        for bound in Bound:
            check_members(replica, bound, newest[bound], limits[bound], shared)
            now = replica.cap.applied if bound is Bound.CAP else replica.applied
            if now.revision < applied[bound]:
                shared.violate(f"applied {bound.value} went back from {applied[bound]} to {now.revision}")
            if limits[bound].get(now.revision, now.limit_tokens) != now.limit_tokens:
                shared.violate(f"{now} was applied, which was never published")
            applied[bound] = now.revision
        if replica.split and not split:
            shared.add("splits")
        if split and not replica.split:
            shared.add("healed")
        split = replica.split
        shared.add("looks")
        time.sleep(0.002)
        for bound, known in limits.items():
            for revision in [revision for revision in known if revision < min(newest[bound].values()) - 100]:
                del known[revision]


def check_members(
    replica: ReplicaStatus, bound: Bound, newest: dict[str, int], limits: dict[int, int], shared: Shared
) -> None:
    """Check that no word of ``bound`` went back, and that none of its revisions has two limits."""
    for member in replica.members:
        word = member.cap if bound is Bound.CAP else Update(member.revision, member.limit_tokens)
        if word.revision < newest[member.gpu]:
            shared.violate(f"{member.gpu} went back from {bound.value} {newest[member.gpu]} to {word.revision}")
        newest[member.gpu] = word.revision
        if limits.setdefault(word.revision, word.limit_tokens) != word.limit_tokens:
            shared.violate(f"revision {word.revision} of the {bound.value} has two numbers")
