"""The pages and the messages that users read: plain words, lines of 120 characters, and every page in the index."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("scripts/**/*.md"), *DOCS.rglob("*.md")])
LONGEST = 120

LOST = re.compile(
    r"\b(stands?\b(?! for\b|-)|stood\b|worked off|works it off|for who\b|to be had\b|hold(s|ing)? to\b|tells? no\b"
    r"|requests leave\b|means? nothing|the door\b|yours to read|is no (file|directory|engine|ledger|number|list)\b)",
    re.IGNORECASE,
)
"""Turns that a reader stumbles over; the usual words are stored, pending, available, keeps, no curve yet, invalid."""


def lines(page: Path) -> list[str]:
    """Return the lines of a page. The history of releases keeps its words."""
    return [] if page.name == "CHANGELOG.md" else page.read_text().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short_and_words_are_plain(page: Path) -> None:
    """No line of a page is longer than 120 characters, and none has a turn that a reader stumbles over."""
    assert [line for line in lines(page) if len(line) > LONGEST] == []
    assert [line for line in lines(page) if LOST.search(line)] == []


def test_messages_are_plain() -> None:
    """The list of everything that users can meet is not empty, and has none of these turns either."""
    program = ROOT / "scripts/documentation/messages.py"
    listed = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(listed) > 400
    for kind in ("raised", "printed", "logged", "help", "doctor"):
        assert any(f"  {kind}  " in line for line in listed), kind
    assert [line for line in listed if LOST.search(line)] == []


def test_every_page_is_in_the_index() -> None:
    """Each page of docs/ has a line in docs/README.md, and the README leads there."""
    index = DOCS / "README.md"
    targets = re.findall(r"^- \[[^]]+\]\(([^)#]+)\): .", index.read_text(), re.MULTILINE)
    linked = {(DOCS / target).resolve() for target in targets}
    assert {page.resolve() for page in DOCS.rglob("*.md")} - {index.resolve()} <= linked
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()


def test_no_command_installs_the_other_project() -> None:
    """No page and no message has a command of pip that would fetch the registry's project of the import name."""
    texts = [page.read_text() for page in PAGES]
    texts += [path.read_text() for path in (ROOT / "kvcached").rglob("*.py")]
    assert [text for text in texts if re.search(r"pip install (\S+ )*'?kvcached(?!-control)\b", text)] == []
