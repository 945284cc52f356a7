"""What tests of all parts share: a ledger directory of their own, and the command line on it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from support.commands import Control, Toys
from support.forked import close_servers
from support.needs import need_module, need_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and programs that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for want of what its marks name; on CI fail it."""
    for mark in item.iter_markers("needs_program"):
        need_program(*mark.args)
    for mark in item.iter_markers("needs_module"):
        need_module(*mark.args)


def pytest_sessionfinish() -> None:
    """End the processes that others were forked from."""
    close_servers()


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


@pytest.fixture
def toys(ledger_dir: Path) -> Iterator[Toys]:
    """Return what starts toy engines on ``ledger_dir``."""
    toys = Toys(ledger_dir)
    yield toys
    toys.stop()
