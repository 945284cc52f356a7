"""What the tests of balancing share: toy engines, and parties of a decision with curves of a known shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.commands import Toys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def toys(ledger_dir: Path) -> Iterator[Toys]:
    """Return what starts toy engines on ``ledger_dir``."""
    toys = Toys(ledger_dir)
    yield toys
    toys.stop()
