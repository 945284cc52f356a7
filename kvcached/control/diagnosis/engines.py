"""Are there engines running that nobody can control, and why."""

from __future__ import annotations

import glob
import os
from typing import TYPE_CHECKING

from kvcached.control.diagnosis.finding import NOTE, OK, PROBLEM, Finding
from kvcached.control.diagnosis.plugins import GROUPS, excludes_plugin
from kvcached.control.diagnosis.processes import engine_roots, family, own_processes
from kvcached.control.text import printable
from kvcached.settings import DISABLE_VARIABLE, LEDGER_DIR_VARIABLE, choose_ledger_dir, is_disabled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcached.control.diagnosis.processes import MappedLedger, Process

STARTING_S = 120.0
"""How long an engine may take to load its model before the lack of a slot means anything."""

_SHOWN_ARGUMENTS = 3


def check_engines(path: str, pid: int | None) -> Iterator[Finding]:
    """Check the engines of this user, or the process ``pid`` alone, whatever it looks like."""
    processes = own_processes()
    if pid is not None and pid not in processes:
        yield Finding(PROBLEM, "engines", f"there is no process {pid} of uid {os.geteuid()} to be seen from here")
        return
    roots = engine_roots(processes) if pid is None else [processes[pid]]
    if not roots:
        yield Finding(NOTE, "engines", f"no serving engine of uid {os.geteuid()} is to be seen from here")
    for root in roots:
        members = family(root, processes)
        mapped = [ledger for process in members for ledger in process.ledgers]
        yield _judge(root, members, mapped, path, asked_for=pid is not None)


def _judge(
    root: Process, members: Sequence[Process], mapped: Sequence[MappedLedger], path: str, *, asked_for: bool
) -> Finding:
    subject = f"pid {root.pid}"
    name = _name(root)
    here = _inodes(path)
    if any(ledger.inode in here for ledger in mapped):
        return Finding(OK, subject, f"{name} is registered here")
    if any(ledger.deleted for ledger in mapped):
        text = f"{name} holds a ledger that was removed: {mapped[0].path}"
        return Finding(PROBLEM, subject, text, "it registers anew within 2 s; if this stays, see its log")
    if mapped:
        directory = os.path.dirname(mapped[0].path)
        text = f"{name} is registered in another directory, {directory}"
        return Finding(PROBLEM if asked_for else NOTE, subject, text, f"use --ledger-dir {directory}")
    reason, remedy = _why_without_slot(root, members, path)
    level = NOTE if root.age_s < STARTING_S and not reason else PROBLEM
    if not reason:
        young = f"it started {root.age_s:.0f} s ago and may be loading its model"
        reason = young if level == NOTE else "the reason is not to be seen from here"
    return Finding(level, subject, f"{name} runs without a slot: {reason}", remedy)


def _inodes(path: str) -> set[int]:
    try:
        with os.scandir(path) as entries:
            return {entry.inode() for entry in entries}
    except OSError:
        return set()


def _why_without_slot(root: Process, members: Sequence[Process], path: str) -> tuple[str, str]:
    """Return the likeliest reason and its remedy; the reason is empty if there is none to be seen."""
    environ = root.environ
    if is_disabled(environ):
        return f"{DISABLE_VARIABLE}=1 is in its environment", "restart it without"
    text = " ".join(argument for process in members for argument in process.arguments).lower()
    for group, variable in GROUPS.items():
        if group.partition(".")[0] in text and excludes_plugin(environ, variable):
            return f"{variable}={environ[variable]!r} leaves kvcached out", "add kvcached to it and restart it"
    prefix = _prefix(root)
    if prefix and not glob.glob(f"{glob.escape(prefix)}/lib/python3*/*-packages/kvcached-*.*-info"):
        return f"kvcached is not installed in its Python, {prefix}", f"{prefix}/bin/python -m pip install kvcached"
    theirs = choose_ledger_dir(None, environ)
    if environ and theirs != path:
        return f"it was started for another ledger directory, {theirs}", f"see its log, or set {LEDGER_DIR_VARIABLE}"
    return "", "see its log for lines of kvcached"


def _prefix(process: Process) -> str:
    """Return where the Python of a process is installed, if its command line tells."""
    folder, _, program = (process.arguments or [""])[0].rpartition("/")
    if folder.endswith("/bin") and program.startswith("python"):
        return folder.removesuffix("/bin")
    return process.environ.get("VIRTUAL_ENV", "")


def _name(process: Process) -> str:
    """Return program and module, or the first arguments, of a command line."""
    arguments = process.arguments or ["(no command line)"]
    program = os.path.basename(arguments[0])
    if "-m" in arguments[:-1]:
        shown = [program, "-m", arguments[arguments.index("-m") + 1]]
    else:
        shown = [program, *arguments[1:_SHOWN_ARGUMENTS]]
    return printable(" ".join(shown))[:60]
