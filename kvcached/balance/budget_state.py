"""What other programs see of the budgets of a ledger directory: which are held, and what was decided last."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcached.balance.budget_lock import PREFIX, STATE_SUFFIX, held_budgets, read_state
from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class BudgetState:
    """One budget: its name, whether a live supervisor holds it, and the fields of its state file, unchecked."""

    name: str
    is_held: bool
    fields: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"name": self.name, "held_by_supervisor": self.is_held, "state": self.fields}

    def number(self, field: str) -> float:
        """Return a number of the state; NaN where it holds none."""
        return _number(self.fields.get(field))

    def instances(self) -> Iterator[tuple[str, str, float]]:
        """Yield name, state and traffic in prompt tokens per second of each instance."""
        found = self.fields.get("instances")
        entries: list[Any] = found if isinstance(found, list) else []
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("state"), str):
                yield entry["name"], entry["state"], _number(entry.get("traffic_tokens_per_second"))


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")


def read_budgets(ledger_dir: str) -> list[BudgetState]:
    """Return the budgets that have a state file in a ledger directory, by name; none where it cannot be read."""
    try:
        with LedgerDirectory(ledger_dir, writable=False) as directory:
            held = set(held_budgets(directory))
            names = sorted(
                name.removeprefix(PREFIX).removesuffix(STATE_SUFFIX)
                for name in os.listdir(directory.descriptor)
                if name.startswith(PREFIX) and name.endswith(STATE_SUFFIX)
            )
            return [BudgetState(name, name in held, read_state(directory, name)) for name in names]
    except (OSError, LedgerDirectoryError):
        return []
