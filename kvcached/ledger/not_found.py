"""What else there is, for people who asked for one thing and found nothing: other instances, other directories."""

from __future__ import annotations

import os
import stat

from kvcached.ledger.directory import Fault
from kvcached.settings import default_ledger_dir

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcached.ledger.snapshot import Snapshot

NAMED_INSTANCES = 8
"""How many instances are named; a directory may have many."""


def live_names_remark(names: Iterable[str]) -> str:
    """Return a remark that names the instances that are live instead, or an empty text if there are none."""
    there = sorted(set(names))
    more = len(there) - NAMED_INSTANCES
    named = ", ".join(there[:NAMED_INSTANCES]) + (f" and {more} more" if more > 0 else "")
    return f"; live there: {named}" if there else ""


def not_found_message(snapshot: Snapshot, wanted: str = "", *, pattern: bool = False) -> str:
    """Return a sentence about an instance, or a pattern, that is not among the live ones of a whole snapshot.

    It names those who are there instead; where nobody is, it says how to start one and which other directories exist.
    """
    path = snapshot.path
    if snapshot.fault is not None:
        return f"{snapshot.reason}{_how_to_start(snapshot)}{other_directories_remark(path)}"
    who = f"no live instance {'matches ' if pattern else ''}{wanted!r}" if wanted else "no live instance"
    if snapshot.names:
        return f"{who} in {path}{live_names_remark(snapshot.names)}"
    if snapshot.unseen:
        return f"{who} was seen in {path}, but some files could not be read: {'; '.join(snapshot.unseen)}"
    return f"{who} in {path}{_how_to_start(snapshot)}{other_directories_remark(path)}"


def _how_to_start(snapshot: Snapshot) -> str:
    """Return how a directory comes into being, if no engine ever used this one."""
    if snapshot.fault not in (None, Fault.ABSENT) or snapshot.files:
        return ""
    return "; start an engine with the plugin, or try one: python -m kvcached.rig --instance chat --linger 600"


def other_directories_remark(path: str) -> str:
    """Return a remark that names the other users' default ledger directories, or an empty text if there are none."""
    others = other_default_dirs(path)
    return f"; other ledger directories here: {', '.join(others)}" if others else ""


def other_default_dirs(path: str, parent: str | None = None) -> list[str]:
    """Return the default ledger directories of this machine apart from ``path``, as far as one may see them.

    Everybody may make names there. Only a directory that belongs to the user whose number it bears is one.
    """
    default, prefix = os.path.split(default_ledger_dir().rstrip("0123456789"))
    parent = default if parent is None else parent
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return []
    found = (f"{parent}/{name}" for name in names if name.startswith(prefix) and _is_owners(parent, name, len(prefix)))
    return [other for other in found if other != path]


def _is_owners(parent: str, name: str, at: int) -> bool:
    number = name[at:]
    if not (number.isascii() and number.isdecimal()):
        return False
    try:
        status = os.lstat(f"{parent}/{name}")
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and str(status.st_uid) == number
