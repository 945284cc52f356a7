"""A memory cgroup of a test's own, version 1 or 2: what the kernel does to processes that together hold too much."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest

CGROUP_ROOT = Path("/sys/fs/cgroup")
VERSION_1 = {"bound": "memory.limit_in_bytes", "anonymous": "rss", "events": "memory.oom_control"}
VERSION_2 = {"bound": "memory.max", "anonymous": "anon", "events": "memory.events"}
REMOVED_WITHIN_S = 10.0


class MemoryCgroup:
    """One cgroup below the root, where no limit but its own counts."""

    def __init__(self) -> None:
        """Make it; the test is skipped where this user cannot."""
        self._names = VERSION_1 if (CGROUP_ROOT / "memory" / VERSION_1["bound"]).exists() else VERSION_2
        root = CGROUP_ROOT / "memory" if self._names is VERSION_1 else CGROUP_ROOT
        self._directory = root / f"kvcached-test-{secrets.token_hex(4)}"
        try:
            self._directory.mkdir()
        except OSError as error:
            pytest.skip(f"needs a memory cgroup that this user may make ({error.strerror})")
        if not (self._directory / self._names["bound"]).exists():
            self._directory.rmdir()
            pytest.skip("needs the memory controller of cgroups")

    @property
    def starter(self) -> list[str]:
        """What to put before a command, so that it and its children are in the group from their first page on."""
        return ["/bin/sh", "-c", f'echo $$ > {self._directory}/cgroup.procs && exec "$@"', "sh"]

    def bound(self, most_bytes: int) -> None:
        """Let the group hold at most ``most_bytes`` from now on, and swap none of it."""
        (self._directory / self._names["bound"]).write_text(str(most_bytes))
        if self._names is VERSION_2:
            (self._directory / "memory.swap.max").write_text("0")
        else:
            (self._directory / "memory.swappiness").write_text("0")

    def anonymous_bytes(self) -> int:
        """Return how much anonymous memory the processes of the group hold."""
        return self._number_in("memory.stat", self._names["anonymous"])

    def kills(self) -> int:
        """Return how many processes the kernel killed because the group held too much."""
        return self._number_in(self._names["events"], "oom_kill")

    def remove(self) -> None:
        """Remove the group, whose processes have ended; the kernel notes their end a little later."""
        deadline = time.monotonic() + REMOVED_WITHIN_S
        while True:
            try:
                self._directory.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def _number_in(self, file: str, name: str) -> int:
        lines = (self._directory / file).read_text().splitlines()
        return next(int(value) for key, value in map(str.split, lines) if key == name)
