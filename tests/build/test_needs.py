"""What a test does that needs what is not there: it is skipped, but never on CI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.needs import need_module, need_program

TESTS = Path(__file__).parents[1]
SKIPS = re.compile(r"skip\w*\([^)]*(which|find_spec)|importorskip|if shutil\.which[^\n]*\n\s+pytest\.skip")


@pytest.mark.parametrize("ci", ["", "false"])
def test_what_is_missing_skips_a_test_on_a_desk(ci: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CI=true a missing program or module skips the test, and says which package has it."""
    monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.skip.Exception, match=r"no-such-program .Debian: apt-get install its-package"):
        need_program("no-such-program", "its-package")
    with pytest.raises(pytest.skip.Exception, match="no_such_module"):
        need_module("no_such_module")


def test_what_is_missing_fails_a_test_on_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CI=true the same is a failure."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"no-such-program .*its-package.* is missing"):
        need_program("no-such-program", "its-package")
    with pytest.raises(pytest.fail.Exception, match="no_such_module is missing"):
        need_module("no_such_module")


def test_what_is_there_lets_a_test_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program on the PATH and an installed module change nothing."""
    monkeypatch.setenv("CI", "true")
    need_program("sh", "dash")
    need_module("json")


def test_no_test_looks_for_programs_by_itself() -> None:
    """Outside the engines' suites, only the common helper skips for want of a program or a module."""
    for path in TESTS.rglob("*.py"):
        if "engines" not in path.parts and path.name not in {"needs.py", Path(__file__).name}:
            found = SKIPS.search(path.read_text())
            assert not found, f"{path}: {found}"
