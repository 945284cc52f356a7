"""The budgets of a ledger directory as lines below ``status``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.control.rendering.text import count, size
from kvcached.printable_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcached.balance.budget_state import BudgetState


def budget_lines(budgets: Sequence[BudgetState]) -> Iterator[str]:
    """Yield a line for each budget: how full it is, and what it does with each instance."""
    for budget in budgets:
        holder = "" if budget.is_held else " (nobody balances it now; as it was last)"
        held, whole = (_amount(budget, field) for field in ("held", "budget"))
        instances = ", ".join(f"{name} {state}" for name, state, _ in budget.instances())
        yield printable(f"budget {budget.name}{holder}: {held} of {whole} held; {instances}")


def _amount(budget: BudgetState, field: str) -> str:
    number = budget.number(field)
    if number != number:  # noqa: PLR0124 - what a state file does not say is NaN
        return "?"
    return size(int(number)) if budget.fields.get("unit") == "bytes" else f"{count(int(number))} tokens"
