"""The budgets of a ledger directory as metrics. Needs prometheus_client, and is imported where that is at hand."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvcached.balance.standing import Standing
from kvcached.printable_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric

    from kvcached.balance.budget_state import BudgetState

_FIGURES = (
    ("kvcached_balance_budget", "budget", "The budget, in its unit (bytes or tokens)."),
    ("kvcached_balance_held", "held", "What the instances of a budget hold of it, in its unit."),
    ("kvcached_balance_over_budget", "over_budget", "By how much more than the budget is held, in its unit."),
)


def budget_metrics(budgets: Sequence[BudgetState]) -> Iterator[Metric]:
    """Yield the metrics of all budgets; without any there are none."""
    if not budgets:
        return
    up = GaugeMetricFamily("kvcached_balance_up", "1 while a supervisor holds the budget, else 0.", labels=("budget",))
    for budget in budgets:
        up.add_metric([budget.name], budget.is_held)
    yield up
    for metric, field, text in _FIGURES:
        figure = GaugeMetricFamily(metric, text, labels=("budget", "unit"))
        for budget in budgets:
            figure.add_metric([budget.name, _unit(budget)], budget.number(field))
        yield figure
    yield _moves(budgets)
    yield _rates(budgets)
    yield _times(budgets)
    yield from _instances(budgets)


def _unit(budget: BudgetState) -> str:
    return "bytes" if budget.fields.get("unit") == "bytes" else "tokens"


def _moves(budgets: Sequence[BudgetState]) -> Metric:
    text = "Decisions that moved a part of the budget since its supervisor started."
    moves = CounterMetricFamily("kvcached_balance_moves", text, labels=("budget",))
    for budget in budgets:
        moves.add_metric([budget.name], budget.number("moves"))
    return moves


def _rates(budgets: Sequence[BudgetState]) -> Metric:
    text = "Predicted hit rate of all balanced instances together, as they are and under the best division."
    rates = GaugeMetricFamily("kvcached_balance_predicted_hit_rate", text, labels=("budget", "division"))
    for budget in budgets:
        for division, field in (("now", "hit_rate_now"), ("best", "hit_rate_then")):
            rates.add_metric([budget.name, division], budget.number(field))
    return rates


def _times(budgets: Sequence[BudgetState]) -> Metric:
    text = "When the last decision was made, in seconds since the epoch."
    times = GaugeMetricFamily("kvcached_balance_last_decision_timestamp_seconds", text, labels=("budget",))
    for budget in budgets:
        times.add_metric([budget.name], _timestamp(budget.fields.get("time")))
    return times


def _timestamp(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return float("nan")


def _instances(budgets: Sequence[BudgetState]) -> Iterator[Metric]:
    labels = ("budget", "instance")
    states = GaugeMetricFamily(
        "kvcached_balance_state", "1 for what balancing does with an instance, else 0.", labels=(*labels, "state")
    )
    traffic = GaugeMetricFamily(
        "kvcached_balance_traffic_tokens_per_second", "Prompt tokens per second, as balancing sees them.", labels=labels
    )
    for budget in budgets:
        for name, found, rate in budget.instances():
            traffic.add_metric([budget.name, printable(name)], rate)
            for standing in Standing:
                states.add_metric([budget.name, printable(name), standing.value], standing.value == found)
    yield states
    yield traffic
