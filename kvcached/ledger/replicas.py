"""Who is alive in a ledger directory: live slots as members, grouped to replicas."""

from __future__ import annotations

import os
from itertools import pairwise

from kvcached.light_dataclasses import dataclass
from kvcached.settings import is_instance_name

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcached.ledger.contents import Slot
    from kvcached.ledger.open_ledger import Ledger
    from kvcached.values import Bound, Update


MAX_MEMBERS = 1024
"""More members than any replica has. A slot says what its writer likes, and that must not cost its readers more."""


@dataclass(frozen=True)
class Member:
    """One live slot and where it is."""

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
    """Return the live replicas, of one instance or of all, ordered by name and replica index.

    Raises :class:`OSError` where the system does not say who is alive, which :mod:`kvcached.ledger.snapshot`
    makes a value.
    """
    members = [Member(ledger, index, slot) for ledger in ledgers for index, slot in ledger.handle.live_slots()]
    return group_members(member for member in members if is_legal(member, instance_name))


def is_legal(member: Member, instance_name: str | None = None) -> bool:
    """Return whether a member is of this instance, or of any whose name an instance can have.

    A name is what its writer left in the file. One that no engine could have registered under is nobody's: it must
    reach no shell, no label and no file name.
    """
    name = member.slot.identity.instance_name
    return name == instance_name if instance_name is not None else is_instance_name(name)


def group_members(members: Iterable[Member]) -> list[Replica]:
    """Return the replicas that these live members make up, ordered by name and replica index."""
    groups: dict[tuple[str, int, int], list[Member]] = {}
    for member in members:
        identity = member.slot.identity
        groups.setdefault((identity.instance_name, identity.replica, member.slot.incarnation), []).append(member)
    return [
        Replica(tuple(sorted(members, key=lambda member: os.fsencode(member.ledger.gpu))))
        for _, members in sorted(groups.items(), key=lambda item: item[0])
    ]


def desired_pairs(replicas: Iterable[Replica], bound: Bound) -> list[Update]:
    """Return what each member of these replicas is told of ``bound``."""
    return [member.slot.desired_of(bound) for replica in replicas for member in replica.members]


def newest_revision(replicas: Iterable[Replica], bound: Bound) -> int:
    """Return the highest revision of ``bound`` that any member of these replicas is told; there has to be one."""
    return max(pair.revision for pair in desired_pairs(replicas, bound))


def find_conflict(replicas: Sequence[Replica]) -> str | None:
    """Return a sentence if two live engines claim to be the same replica of the same instance."""
    for one, other in pairwise(replicas):
        left, right = one.slot.identity, other.slot.identity
        if (left.instance_name, left.replica) == (right.instance_name, right.replica):
            return (
                f"two live engines are named {left.instance_name!r} (replica {left.replica}): "
                f"pid {one.slot.pid} and pid {other.slot.pid}; stop one of them or rename it"
            )
    return None
