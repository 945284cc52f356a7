"""Short runs of what runs for hours elsewhere: the kill storms and the soak (see docs/reliability.md)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = random.SystemRandom().randrange(2**31)


def run(script: str, *arguments: str) -> str:
    """Run a program of this folder with a random seed, which is printed, and return what it said."""
    command = [sys.executable, str(Path(__file__).parent / script), "--seed", str(SEED), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    return result.stdout


def test_a_short_storm_breaks_nothing() -> None:
    """Some hundred publishers and engines die at random points, and every promise holds."""
    assert "violations 0" in run("kill_storm.py", "--kills", "100", "--no-rigs")


def test_figures_of_a_storm_add_up_over_runs(tmp_path: Path) -> None:
    """A storm goes on where an earlier one ended."""
    state = tmp_path / "figures.json"
    for _ in range(2):
        run("kill_storm.py", "--kills", "1", "--no-rigs", "--state", str(state))
    assert '"runs": 2' in state.read_text()


def test_a_short_balance_storm_stays_within_the_budget() -> None:
    """Supervisors die at random points of their rounds, and no look shows more than the budget."""
    assert "above the budget 0" in run("balance_storm.py", "--kills", "40")


def test_the_balance_storm_sees_a_round_that_does_not_wait() -> None:
    """Rounds that raise before anything was given back are seen above the budget."""
    with pytest.raises(AssertionError):
        run("balance_storm.py", "--kills", "40", "--fault", "no-waiting")


@pytest.mark.needs_module("torch")
def test_a_short_soak_leaves_all_ranks_equal() -> None:
    """Some seconds of chaos around an engine under load end with equal ranks and the last limit in force."""
    assert "digests equal on 4 ranks" in run("soak.py", "--minutes", "0.1")


@pytest.mark.needs_program("gcc", "gcc")
def test_a_short_storm_in_c_breaks_nothing(tmp_path: Path) -> None:
    """A thousand deaths in the library leave words whole, the dead dead, and publications possible."""
    program = tmp_path / "storm"
    sources = [*(ROOT / "native").glob("*.c"), ROOT / "native" / "storm" / "storm.c"]
    subprocess.run(
        ["gcc", "-O2", "-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pthread", "-o", program, *sources],
        check=True,
    )
    directory = tmp_path / "ledgers"
    directory.mkdir()
    result = subprocess.run([program, directory, "1000", str(SEED)], capture_output=True, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0
