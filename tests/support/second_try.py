"""Runs a suite of tests and, where some failed, only those again: twice, and both times all of them have to pass.

    python3 tests/support/second_try.py RECORD SUITE AGAIN

SUITE and AGAIN are commands of the shell, run in the current folder; AGAIN is given --last-failed. A test that failed
and then passed twice is called flaky, by name, and goes into the file RECORD. The run fails all the same if RECORD
names the test already, since it then needed a second try twice in a row, or once RECORD names more than MOST_FLAKY.
Exit status: 0 if all passed, or the suite's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST_FLAKY = 5
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def say(sentence: str) -> None:
    """Print a line of our own."""
    print(f"second-try: {sentence}", flush=True)


def run(command: str) -> int:
    """Run a command of the shell; return its exit status."""
    return subprocess.run(command, shell=True, check=False).returncode  # noqa: S602 - the caller's own words


def read_failed() -> list[str]:
    """Return the names of the tests that failed last."""
    return sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []


def fails_again(again: str, failed: list[str]) -> bool:
    """Run the failed tests twice more; return whether any of them failed in that."""
    for _ in range(2):
        LAST_FAILED.write_text(json.dumps(dict.fromkeys(failed, True)))
        if run(f"{again} --last-failed") != 0:
            return True
    return False


def judge_flaky(record: Path, failed: list[str]) -> int:
    """Name the flaky tests and remember them; return 1 if that is once too often."""
    known = record.read_text().splitlines() if record.exists() else []
    for name in failed:
        say(f"FLAKY: {name} failed, and then passed twice")
    record.write_text("".join(f"{name}\n" for name in [*known, *failed]))
    repeated = sorted(set(known) & set(failed))
    for name in repeated:
        say(f"FAILED: {name} needed a second try for the second time")
    if len(known) + len(failed) > MOST_FLAKY:
        say(f"FAILED: {len(known) + len(failed)} flaky tests in one run, more than {MOST_FLAKY}")
    return 1 if repeated or len(known) + len(failed) > MOST_FLAKY else 0


def main() -> int:
    """Run the suite, and what failed of it again."""
    record, suite, again = sys.argv[1:]
    LAST_FAILED.unlink(missing_ok=True)
    status = run(suite)
    if status == 0:
        return 0
    failed = read_failed()
    if not failed:
        say(f"FAILED: {suite}: no test failed by name, so nothing is tried again")
        return status
    say(f"again, twice: {', '.join(failed)}")
    if fails_again(again, failed):
        say(f"FAILED again: {', '.join(read_failed() or failed)}")
        return status
    return judge_flaky(Path(record), failed)


if __name__ == "__main__":
    sys.exit(main())
