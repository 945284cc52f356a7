"""What CI does with a test that failed: it is tried twice more, and whatever was flaky is said by name."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "support" / "second_try.py"
PYTEST = f"{shlex.quote(sys.executable)} -m pytest -q"
SUITE = '''
from pathlib import Path
import pytest

def tries(name):
    """Count how often a test was run."""
    with Path(name).open("a") as file:
        file.write("x")
    return len(Path(name).read_text())

def test_good():
    tries("good")

@pytest.mark.parametrize("name", ["one two", "three", "four", "five", "six", "seven"])
def test_flaky(name):
    assert tries(name) not in FAILING.get(name, ())
'''


def try_suite(folder: Path, failing: dict[str, tuple[int, ...]], suite: str = PYTEST) -> tuple[int, str]:
    """Run a suite in which each test fails at some of its tries; return the exit status and the output."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_suite.py").write_text(f"FAILING = {failing!r}\n{SUITE}")
    command = [sys.executable, str(PROGRAM), "record", suite, PYTEST]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr)
    return result.returncode, result.stdout


def test_a_flaky_test_is_named_and_fails_a_run_the_second_time(tmp_path: Path) -> None:
    """A test that passes twice after a failure is flaky, by name; in another suite of the run it is a failure."""
    status, output = try_suite(tmp_path, {"one two": (1, 4)})
    assert status == 0
    assert "second-try: FLAKY: test_suite.py::test_flaky[one two] failed, and then passed twice\n" in output
    assert (tmp_path / "record").read_text() == "test_suite.py::test_flaky[one two]\n"
    assert (tmp_path / "good").read_text() == "x"  # what passed is not run again
    status, output = try_suite(tmp_path, {"one two": (1, 4)})
    assert status == 1
    assert "second-try: FAILED: test_suite.py::test_flaky[one two] needed a second try for the second time\n" in output


def test_a_test_that_fails_once_more_is_a_failure(tmp_path: Path) -> None:
    """Of the two tries after a failure both count."""
    status, output = try_suite(tmp_path, {"one two": (1, 3)})
    assert status == 1
    assert "second-try: FAILED again: test_suite.py::test_flaky[one two]\n" in output
    assert "FLAKY" not in output


def test_too_many_flaky_tests_are_a_failure(tmp_path: Path) -> None:
    """Six tests that need a second try fail the run, however they end then."""
    names = ("one two", "three", "four", "five", "six", "seven")
    status, output = try_suite(tmp_path, dict.fromkeys(names, (1,)))
    assert status == 1
    assert output.count("FLAKY") == 6
    assert "second-try: FAILED: 6 flaky tests in one run, more than 5\n" in output


def test_what_is_no_test_is_not_tried_again(tmp_path: Path) -> None:
    """A suite that fails before its tests, as lint does, fails the run at once, whatever failed in an earlier one."""
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text('{"test_suite.py::test_good": true}')
    status, output = try_suite(tmp_path, {}, suite="echo lint; exit 7")
    assert status == 7
    assert output.splitlines() == [
        "lint",
        "second-try: FAILED: echo lint; exit 7: no test failed by name, so nothing is tried again",
    ]
