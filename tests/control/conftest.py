"""The command line under test: real processes of it, against toy engines that are processes too."""

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
