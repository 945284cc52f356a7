"""Instances as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from kvcached.instances import InstanceStatus, ReplicaStatus


def print_instances(instances: Sequence[InstanceStatus]) -> None:
    """Print one row per replica."""
    try:
        from rich.console import Console  # noqa: PLC0415 - engines' environments may lack it; --json works all the same
    except ImportError as error:
        message = "the table needs the package rich (pip install rich); --json works without it"
        raise SystemExit(message) from error
    Console().print(_table(instances))


def _table(instances: Sequence[InstanceStatus]) -> Table:
    from rich.table import Table  # noqa: PLC0415 - as above

    table = Table(box=None, pad_edge=False)
    table.add_column("INSTANCE", no_wrap=True)
    table.add_column("ENGINE")
    for heading in ("DESIRED", "APPLIED", "IDLE", "ACTIVE", "CAPACITY", "EVICTED"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("OUTCOME")
    for instance in instances:
        for replica in instance.replicas:
            table.add_row(*_row(instance, replica))
    return table


def _row(instance: InstanceStatus, replica: ReplicaStatus) -> list[str]:
    desired = max(replica.members, key=lambda member: member.revision)
    outcome = f"{replica.outcome.value}{': ' + replica.reason if replica.reason else ''}"
    return [
        instance.name if len(instance.replicas) == 1 else f"{instance.name}/{replica.replica}",
        f"{instance.engine} {instance.pid}",
        _pair(desired.revision, desired.limit_tokens) + (" split" if replica.split else ""),
        _pair(replica.applied.revision, replica.applied.limit_tokens),
        f"{replica.idle_tokens:,}",
        f"{replica.active_tokens:,}",
        f"{replica.capacity_tokens:,}",
        f"{replica.evicted_tokens:,}",
        outcome,
    ]


def _pair(revision: int, limit_tokens: int) -> str:
    return f"r{revision} {'unlimited' if limit_tokens < 0 else f'{limit_tokens:,}'}"
