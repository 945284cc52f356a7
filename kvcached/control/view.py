"""What a look at a ledger directory shows: its instances, and what in it cannot be used."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached.instances import statuses_of
from kvcached.replicas import find_conflict, find_replicas

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.instances import InstanceStatus
    from kvcached.ledger import Ledger, LedgerDirectory, Refusal


@dataclass(frozen=True)
class View:
    """One look. ``conflict`` is a sentence if two live engines claim one name."""

    instances: tuple[InstanceStatus, ...]
    refusals: tuple[Refusal, ...]
    conflict: str | None


def read_view(directory: LedgerDirectory, ledgers: Sequence[Ledger], instance_name: str | None) -> View:
    """Return the state of one instance or of all in ledgers that ``directory`` opened."""
    replicas = find_replicas(ledgers, instance_name)
    return View(statuses_of(replicas), tuple(directory.refusals), find_conflict(replicas))
