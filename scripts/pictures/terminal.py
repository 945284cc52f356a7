"""Capture what the command line shows on a terminal of 80 columns into docs/terminal, as text and as pictures.

Without options it starts a rig of four ranks and captures ``status``, ``set --wait``, ``watch`` and ``doctor``. With
``--prefix``, ``--instance``, ``--ledger-dir`` and ``--pid`` it captures an engine that runs already. Needs tmux.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kvcached.control import get_instances, set_prefix_cache_retention_limit

if TYPE_CHECKING:
    from kvcached.ledger.instances import InstanceStatus

ROOT = Path(__file__).resolve().parents[2]
TERMINAL = ROOT / "docs" / "terminal"
COLUMNS, LINES = 80, 40
PROMPT = "$ "


@dataclass(frozen=True)
class Subject:
    """The engine that is looked at."""

    instance: str
    ledger_dir: str
    pid: int
    prefix: str
    limit: str


class Terminal:
    """A tmux session of our own with a shell in it."""

    def __init__(self, subject: Subject) -> None:
        self._socket = f"kvcached-capture-{os.getpid()}"
        program = Path(sys.executable).parent
        environment = {
            **os.environ,
            "PATH": f"{program}:{os.environ['PATH']}",
            "KVCACHED_LEDGER_DIR": subject.ledger_dir,
            "TERM": "xterm-256color",
        }
        environment.pop("NO_COLOR", None)
        self._tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), "bash --norc", environment=environment)
        time.sleep(0.5)
        self._tmux("send-keys", f"PS1='{PROMPT}'", "Enter")

    def _tmux(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        command = ["tmux", "-L", self._socket, "-f", "/dev/null", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return result.stdout

    def type(self, line: str) -> None:
        """Type a line on a clean screen."""
        self._tmux("send-keys", "clear; tput rmcup", "Enter")
        time.sleep(0.3)
        self._tmux("clear-history")
        self._tmux("send-keys", line, "Enter")

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._tmux("send-keys", "C-c")

    def shown(self) -> str:
        """Return what the screen shows, with its colours."""
        return self._tmux("capture-pane", "-e", "-p").rstrip() + "\n"

    def close(self) -> None:
        """End the session."""
        self._tmux("kill-server")


def save(name: str, shown: str) -> None:
    """Write a capture as text and as a picture."""
    shown = shown.replace(str(ROOT), "/home/user")  # where this checkout lies is nobody's business
    text = Text.from_ansi(shown)
    plain = "\n".join(line.rstrip() for line in text.plain.splitlines()).strip("\n") + "\n"
    TERMINAL.mkdir(parents=True, exist_ok=True)
    (TERMINAL / f"{name}.txt").write_text(plain)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(text, end="")
    console.save_svg(str(TERMINAL / f"{name}.svg"), title="kvcached-control", unique_id=f"kvcached-{name}")
    sys.stdout.write(f"--- {name}\n{plain}")


def capture(subject: Subject) -> None:
    """Capture all commands on one engine."""
    name, prefix = subject.instance, subject.prefix
    terminal = Terminal(subject)
    try:
        publish(subject, -1)
        time.sleep(2.0)  # the load goes on and fills the cache
        terminal.type(f"kvcached-control set {subject.limit} --instance {name} --wait --note 'make room'")
        progress = _until(terminal, "above the limit", patience_s=10.0)
        if progress is not None:
            save(f"{prefix}set-wait-progress", progress)
        save(f"{prefix}set-wait", _until(terminal, "applied r", patience_s=60.0) or terminal.shown())
        terminal.type("kvcached-control status --history")
        save(f"{prefix}status", _until(terminal, "note: make room", patience_s=20.0) or terminal.shown())
        terminal.type("kvcached-control watch --interval 0.25")
        capacity = engine(subject).replicas[0].capacity_tokens
        for share in (0.25, 0.12, 0.36, 0.06):
            time.sleep(2.0)
            publish(subject, round(int(capacity * share), -2))
        time.sleep(1.0)
        save(f"{prefix}watch", terminal.shown())
        terminal.interrupt()
        terminal.type(f"kvcached-control doctor --pid {subject.pid}")
        save(f"{prefix}doctor", _until(terminal, "problem", patience_s=20.0) or terminal.shown())
    finally:
        terminal.close()


def engine(subject: Subject) -> InstanceStatus:
    """Return what the engine reports."""
    (found,) = [entry for entry in get_instances(subject.ledger_dir) if entry.name == subject.instance]
    return found


def publish(subject: Subject, limit: int) -> None:
    """Publish from this process."""
    set_prefix_cache_retention_limit(limit, instance_name=subject.instance, ledger_dir=subject.ledger_dir)


def _until(terminal: Terminal, text: str, *, patience_s: float) -> str | None:
    """Return the screen once it shows ``text``."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        shown = terminal.shown()
        if text in shown.partition("\n")[2]:
            return shown
        time.sleep(0.02)
    return None


def capture_rig() -> None:
    """Start a rig of four ranks under load, and capture it."""
    with tempfile.TemporaryDirectory(prefix="k") as ledger_dir:
        command = [sys.executable, "-m", "kvcached.rig", "--tp", "4", "--requests", "30000", "--chunk-tokens", "512"]
        command += ["--speed", "5", "--linger", "600", "--instance", "demo", "--ledger-dir", ledger_dir]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rig:
            if rig.stdout is None or not rig.stdout.readline().startswith("ready"):
                message = "the rig did not start"
                raise SystemExit(message)
            try:
                capture(Subject("demo", ledger_dir, rig.pid, "rig-", "4k"))
            finally:
                rig.terminate()


def main() -> None:
    """Capture an engine that runs already, or a rig."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instance")
    parser.add_argument("--ledger-dir")
    parser.add_argument("--pid", type=int, help="of the process that was started")
    parser.add_argument("--prefix")
    parser.add_argument("--limit", default="4k")
    options = parser.parse_args()
    if options.instance is None:
        capture_rig()
    else:
        capture(Subject(options.instance, options.ledger_dir, options.pid, options.prefix, options.limit))


if __name__ == "__main__":
    main()
