"""Are there engines running that nobody can control, and why."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcached.control.diagnosis.environments import (
    DISTRIBUTION,
    owners,
    package_folders,
    python_prefix,
    python_program,
)
from kvcached.control.diagnosis.finding import NOTE, OK, PROBLEM, Finding
from kvcached.control.diagnosis.plugins import GROUPS, excludes_plugin
from kvcached.control.diagnosis.processes import engine_roots, family, own_processes
from kvcached.printable_text import printable
from kvcached.settings import DISABLE_VARIABLE, LEDGER_DIR_VARIABLE, choose_ledger_dir, is_disabled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvcached.control.diagnosis.processes import HeldLedger, Process

STARTING_S = 120.0
"""How long an engine may take to load its model before the lack of a slot means anything."""

_SHOWN_ARGUMENTS = 3


def check_engines(path: str, pid: int | None) -> Iterator[Finding]:
    """Check the engines of this user, or the process ``pid`` alone, whatever it looks like."""
    processes = own_processes()
    if pid is not None and pid not in processes:
        yield Finding(PROBLEM, "engines", f"no process {pid} of uid {os.geteuid()} is visible from here")
        return
    roots = engine_roots(processes) if pid is None else _asked_for(processes[pid], processes)
    if not roots:
        yield Finding(NOTE, "engines", f"no serving engine of uid {os.geteuid()} is visible from here")
    here = _files_in(path)
    for root in roots:
        if pid is not None and root.pid != pid:
            yield Finding(
                NOTE, f"pid {pid}", f"{_name(processes[pid])} is not an engine; the engine that it started is below"
            )
        yield _judge(root, family(root, processes), here, path, asked_for=pid is not None)


def _asked_for(process: Process, processes: Mapping[int, Process]) -> list[Process]:
    """Return whom a pid means: that process, or, if it is none and holds no ledger, the engines that it started.

    A shell, or pid 1, is no engine because there is one among all that descend from it.
    """
    if process.looks_like_engine or process.ledgers:
        return [process]
    below = {member.pid: member for member in family(process, processes)}
    return engine_roots(below) or [process]


def _judge(
    root: Process, members: Sequence[Process], here: set[tuple[int, int]], path: str, *, asked_for: bool
) -> Finding:
    subject = f"pid {root.pid}"
    name = _name(root)
    held = [ledger for process in members for ledger in process.ledgers]
    if any((ledger.device, ledger.inode) in here for ledger in held):
        return Finding(OK, subject, f"{name} is registered here")
    if any(ledger.deleted for ledger in held):
        text = f"{name} uses a ledger that was removed: {held[0].path}"
        return Finding(PROBLEM, subject, text, "it registers again within 2 s; if not, see its log")
    if any(ledger.device is None and ledger.inode in {inode for _, inode in here} for ledger in held):
        text = f"{name} uses {held[0].path}, which may be the file with that inode here; its device is unknown"
        return Finding(NOTE, subject, text, "to be sure, run doctor as root or with the capability to trace it")
    if held:
        return _elsewhere(name, subject, held[0], asked_for=asked_for)
    return _without_slot(root, members, path, asked_for=asked_for)


def _elsewhere(name: str, subject: str, held: HeldLedger, *, asked_for: bool) -> Finding:
    directory = os.path.dirname(held.path)
    try:
        status = os.stat(held.path)
        same = (status.st_dev, status.st_ino) == (held.device, held.inode)
    except OSError:
        same = False
    seen = "" if same else " (its own path, in a container or on a separate mount)"
    remedy = f"use --ledger-dir {directory}" if same else "run this command where that engine runs"
    text = f"{name} is registered in another directory, {directory}{seen}"
    return Finding(PROBLEM if asked_for else NOTE, subject, text, remedy)


def _without_slot(root: Process, members: Sequence[Process], path: str, *, asked_for: bool) -> Finding:
    subject, name = f"pid {root.pid}", _name(root)
    reason, remedy = _why_without_slot(root, members)
    if reason:
        return Finding(PROBLEM, subject, f"{name} runs without a slot: {reason}", remedy)
    theirs = choose_ledger_dir(None, root.environ)
    if root.environ and theirs != path:
        # It may be registered there, or about to be: another directory's engine is no problem of this one's.
        text = f"{name} runs without a slot: it was started for another ledger directory, {theirs}"
        return Finding(PROBLEM if asked_for else NOTE, subject, text, f"see its log, or set {LEDGER_DIR_VARIABLE}")
    if root.age_s < STARTING_S:
        text = f"{name} runs without a slot: it started {root.age_s:.0f} s ago and may be loading its model"
        return Finding(NOTE, subject, text, remedy)
    return Finding(PROBLEM, subject, f"{name} runs without a slot: the reason is not visible from here", remedy)


def _files_in(path: str) -> set[tuple[int, int]]:
    """Return device and inode of each file: an inode number alone occurs once on every file system."""
    found = set()
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                found.add((status.st_dev, status.st_ino))
    return found


def _why_without_slot(root: Process, members: Sequence[Process]) -> tuple[str, str]:
    """Return the likeliest reason and its remedy; the reason is empty if none can be seen."""
    environ = root.environ
    if is_disabled(environ):
        return f"{DISABLE_VARIABLE}=1 is in its environment", "restart it without that"
    text = " ".join(argument for process in members for argument in process.arguments).lower()
    for group, variable in GROUPS.items():
        if group.partition(".")[0] in text and excludes_plugin(environ, variable):
            return f"{variable}={environ[variable]!r} excludes kvcached", "add kvcached to it and restart it"
    if "sglang" in text and "--use-ray" in text:
        return "SGLang starts its schedulers as Ray actors, which load no plugins", "start it without --use-ray"
    folders = package_folders(root)
    found = list(owners(folders))
    if folders and not any(own for own, _ in found):
        remedy = f"install {DISTRIBUTION} with {python_program(root)} -m pip, and restart the engine"
        if found:
            return f"its Python has {found[0][1]}, which is another project, and not {DISTRIBUTION}", remedy
        return f"{DISTRIBUTION} is not installed in its Python, {python_prefix(root)}", remedy
    return "", "look for kvcached in its log"


def _name(process: Process) -> str:
    """Return program and module, or the first arguments, of a command line."""
    arguments = process.arguments or ["(no command line)"]
    program = os.path.basename(arguments[0])
    if "-m" in arguments[:-1]:
        shown = [program, "-m", arguments[arguments.index("-m") + 1]]
    else:
        shown = [program, *arguments[1:_SHOWN_ARGUMENTS]]
    return printable(" ".join(shown))[:60]
