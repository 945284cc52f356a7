"""Who is alive in a ledger directory: live slots as members, grouped to replicas."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcached._native import Slot
    from kvcached.ledger import Ledger


MAX_MEMBERS = 1024
"""More members than any replica has. What stands in a slot is its writer's word, and must not cost its readers more."""


@dataclass(frozen=True)
class Member:
    """One live slot and where it stands."""

    ledger: Ledger
    index: int
    slot: Slot


@dataclass(frozen=True)
class Replica:
    """The live members of one registration, in byte order of their GPU ids, which is the order of publication."""

    members: tuple[Member, ...]

    @property
    def slot(self) -> Slot:
        """The first member's slot: identity and report are the same in all of them."""
        return self.members[0].slot

    @property
    def missing(self) -> list[int]:
        """The indices of members that have no live slot here."""
        present = {member.slot.member for member in self.members}
        return [index for index in range(min(self.slot.members, MAX_MEMBERS)) if index not in present]


def find_replicas(ledgers: Iterable[Ledger], instance_name: str | None = None) -> list[Replica]:
    """Return the live replicas, of one instance or of all, ordered by name and replica index."""
    groups: dict[tuple[str, int, int], list[Member]] = {}
    for ledger in ledgers:
        for index, slot in ledger.handle.live_slots():
            if instance_name is None or slot.identity.instance_name == instance_name:
                key = (slot.identity.instance_name, slot.identity.replica, slot.incarnation)
                groups.setdefault(key, []).append(Member(ledger, index, slot))
    return [
        Replica(tuple(sorted(members, key=lambda member: os.fsencode(member.ledger.gpu))))
        for _, members in sorted(groups.items(), key=lambda item: item[0])
    ]


def find_conflict(replicas: Sequence[Replica]) -> str | None:
    """Return a sentence if two live engines claim to be the same replica of the same instance."""
    for one, other in pairwise(replicas):
        left, right = one.slot.identity, other.slot.identity
        if (left.instance_name, left.replica) == (right.instance_name, right.replica):
            return (
                f"two live engines call themselves {left.instance_name!r} (replica {left.replica}): "
                f"pid {one.slot.pid} and pid {other.slot.pid}; stop one of them or rename it"
            )
    return None
