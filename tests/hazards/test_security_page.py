"""The page on security names tests: each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_claim_names_tests_that_exist() -> None:
    """Whatever docs/security.md calls a test is one, in Python or in C."""
    page = (ROOT / "docs/security.md").read_text()
    python = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    c = "\n".join(path.read_text() for path in (ROOT / "native/tests").glob("*.c"))
    named = set(re.findall(r"\btest_[a-z0-9_]+(?=`|,|\))", page)) - {
        path.stem for path in (ROOT / "tests").rglob("*.py")
    }
    assert len(named) > 10
    assert [name for name in sorted(named) if f"def {name}(" not in python] == []
    in_c = {name for group in re.findall(r"native(?:/tests/\w+\.c)?: ([a-z_, ]+)`", page) for name in group.split(", ")}
    assert len(in_c) > 8
    assert [name for name in sorted(in_c) if f"TEST({name}," not in c] == []
