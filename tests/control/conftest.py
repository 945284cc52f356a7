"""The command line under test: real processes of it, against toy engines that are processes too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.commands import Control, Toys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def ledger_dir(tmp_path: Path) -> Path:
    """Return an empty ledger directory that only its owner may use."""
    directory = tmp_path / "ledger"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def control(ledger_dir: Path) -> Control:
    """Return the command line on ``ledger_dir``."""
    return Control(ledger_dir)


@pytest.fixture
def toys(ledger_dir: Path) -> Iterator[Toys]:
    """Return what starts toy engines on ``ledger_dir``."""
    toys = Toys(ledger_dir)
    yield toys
    toys.stop()
