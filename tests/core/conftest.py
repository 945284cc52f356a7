"""What the core's tests share: a ledger directory of their own, and engines in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.toys import identity

from kvcached.ledger.subscription import Subscription

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def subscribe(ledger_dir: Path) -> Iterator[Callable[..., Subscription]]:
    """Register engines in this process; all are closed at the end."""
    opened: list[Subscription] = []

    def start(name: str = "engine", gpus: tuple[str, ...] = ("cpu-0", "cpu-1"), **fields: object) -> Subscription:
        subscription = Subscription(identity(name, **fields), gpus, str(ledger_dir))  # type: ignore[arg-type]
        subscription.start()
        opened.append(subscription)
        return subscription

    yield start
    for subscription in opened:
        subscription.close()
