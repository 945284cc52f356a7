"""What tests of all parts share: a ledger directory of their own, and the command line on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.commands import Control

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def ledger_dir(tmp_path: Path) -> Path:
    """Return an empty ledger directory that only its owner may use."""
    directory = tmp_path / "ledgers"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def control(ledger_dir: Path) -> Control:
    """Return the command line on ``ledger_dir``."""
    return Control(ledger_dir)
