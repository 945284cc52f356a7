"""What a run of the command line imports: every module costs every run of it, so the slow ones come when needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvcached

if TYPE_CHECKING:
    from support.commands import Toys

PACKAGE = Path(kvcached.__file__).parent

SLOW = {
    "asyncio",
    "dataclasses",
    "importlib.metadata",
    "inspect",
    "logging",
    "pathlib",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "typing",
    "unittest",
}

LIGHT = [
    ("set", "16k", "--instance", "chat"),
    ("set", "16k", "--all", "--json"),
    ("set", "16k", "--instance", "nobody"),
    ("set", "none", "--instance", "chat", "--dry-run"),
    ("set", "16k", "--instance", "chat", "--wait", "0"),
    ("cap", "16k", "--instance", "chat"),
    ("status",),
    ("status", "--json"),
    ("status", "--history"),
]
"""What operators and their scripts run often. Start-time tricks are for these, and for nothing else."""

TRICKS = re.compile(r"^TYPE_CHECKING = False|^ *from kvcached\.light_dataclasses import", re.MULTILINE)


def imported_by(words: tuple[str, ...], directory: Path) -> set[str]:
    """Run one command, and return the modules that it imported."""
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; from kvcached.control.__main__ import main; main(); "
        "sys.stdout.write('\\n' + ' '.join(sys.modules))"
    )
    command = [sys.executable, "-S", "-c", code, *words, "--ledger-dir", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_frequent_commands_import_no_slow_module(toys: Toys, words: tuple[str, ...]) -> None:
    """Publishing and looking import no module that costs their start milliseconds without being needed."""
    toys.start("chat")
    assert imported_by(words, toys.directory) & SLOW == set()


def test_start_time_tricks_are_only_where_a_frequent_command_starts(toys: Toys) -> None:
    """What is written differently to start sooner is in modules that frequent commands import, and in no others."""
    toys.start("chat")
    imported = set().union(*(imported_by(words, toys.directory) for words in LIGHT))
    for path in sorted(PACKAGE.rglob("*.py")):
        if TRICKS.search(path.read_text()):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            assert ".".join(parts).removesuffix(".__init__") in imported, f"{path} can be ordinary Python"
