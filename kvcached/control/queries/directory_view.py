"""What a look at a ledger directory shows: its instances, and what in it cannot be used."""

from __future__ import annotations

from kvcached.ledger.instances import statuses_of
from kvcached.ledger.not_found import not_found_message
from kvcached.light_dataclasses import dataclass

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from kvcached.ledger.directory import Refusal
    from kvcached.ledger.instances import InstanceStatus
    from kvcached.ledger.snapshot import Snapshot


@dataclass(frozen=True)
class View:
    """One look. ``conflict`` is a sentence if two live engines claim one name, ``not_found`` one if there are none."""

    instances: tuple[InstanceStatus, ...]
    refusals: tuple[Refusal, ...]
    conflict: str | None = None
    not_found: str = ""

    @property
    def problems(self) -> list[str]:
        """Sentences about what in the directory is not as it should be."""
        problems = [f"{refusal.path}: {refusal.reason}" for refusal in self.refusals]
        return [*problems, self.conflict] if self.conflict else problems


def view_of(snapshot: Snapshot, wanted: str | None = None) -> View:
    """Return what a look at a directory shows to users, of one instance or of all."""
    shown = snapshot.of(wanted) if wanted else snapshot
    missing = "" if shown.replicas else not_found_message(snapshot, wanted or "")
    return View(statuses_of(shown.replicas), snapshot.refusals, shown.conflict, missing)
