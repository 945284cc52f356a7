"""Which ledger directory is meant, why that one, and may it be used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvcached.control.diagnosis.finding import NOTE, OK, PROBLEM, Finding
from kvcached.ledger.directory import SUFFIX
from kvcached.ledger.not_found import other_default_dirs
from kvcached.ledger.ownership import describe, directory_problem, ownership
from kvcached.settings import LEDGER_DIR_VARIABLE, default_ledger_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

SUBJECT = "ledger directory"
SPACE = "free space"
LEDGER_BYTES = 81920
_LOW_BYTES = 1 << 20


def check_directory(path: str, *, named: bool) -> Iterator[Finding]:
    """Check the directory; ``named`` tells that the command line named it."""
    yield Finding(OK, SUBJECT, f"{path}, {_why(named=named)}")
    others = other_default_dirs(path)
    if others:
        yield Finding(NOTE, SUBJECT, f"this machine has others: {', '.join(others)}")
    try:
        status = os.stat(path)
    except OSError as error:
        yield Finding(PROBLEM, SUBJECT, f"{path}: {error.strerror}{ownership(path)}", _remedy_of_missing())
        return
    if not os.path.isdir(path):
        yield Finding(
            PROBLEM, SUBJECT, f"{path} is not a directory{ownership(path)}", "remove it, or choose another one"
        )
        return
    yield from _check_access(path, status)
    if _is_removed_at_log_out(path):
        remedy = "set RemoveIPC=no in logind.conf, run engines as a system user, or loginctl enable-linger"
        yield Finding(NOTE, SUBJECT, "systemd may remove it when the last session of this user ends", remedy)


def _check_access(path: str, status: os.stat_result) -> Iterator[Finding]:
    """Check what may be done here. A mount that is read-only on purpose, as for monitoring, is no problem."""
    where = describe(status.st_uid, status.st_mode).strip()
    mounted_read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    problem = directory_problem(status, is_default=path == default_ledger_dir(), writable=not mounted_read_only)
    if problem:
        yield Finding(PROBLEM, SUBJECT, f"{path} {problem}")
    elif mounted_read_only:
        text = f"is mounted read-only here {where}{READ_ONLY}"
        yield Finding(NOTE, SUBJECT, text, "to publish, mount it writable")
    elif os.access(path, os.W_OK | os.X_OK):
        yield Finding(OK, SUBJECT, f"may be read and written {where}")
        yield _check_space(path)
    else:
        remedy = "give write permission to your user or group, or mount it writable"
        text = f"{path} is not writable for uid {os.geteuid()} {where}"
        readable = os.access(path, os.R_OK | os.X_OK) and _holds_readable_ledgers(path)
        yield Finding(NOTE if readable else PROBLEM, SUBJECT, f"{text}{READ_ONLY if readable else ''}", remedy)


READ_ONLY = ": status, watch and metrics work, set does not"


def _holds_readable_ledgers(path: str) -> bool:
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return any(name.endswith(SUFFIX) and os.access(f"{path}/{name}", os.R_OK) for name in names)


def _why(*, named: bool) -> str:
    if named:
        return "named by --ledger-dir"
    if os.environ.get(LEDGER_DIR_VARIABLE):
        return f"from {LEDGER_DIR_VARIABLE}"
    return f"the default, since {LEDGER_DIR_VARIABLE} is not set"


def _remedy_of_missing() -> str:
    return f"start an engine with the plugin, or set {LEDGER_DIR_VARIABLE} to the directory that the engine uses"


def _check_space(path: str) -> Finding:
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    text = f"{free // 1024:,} KiB free; a ledger takes {LEDGER_BYTES // 1024}"
    if status.f_files and not status.f_favail:
        text = f"all {status.f_files:,} inodes are used, so no ledger can be created, though {text}"
        return Finding(PROBLEM, SPACE, text, "remove files, or mount it with more inodes (tmpfs: nr_inodes)")
    if free < LEDGER_BYTES:
        remedy = "free some space, or enlarge the file system (in a container: a larger shm size)"
        return Finding(PROBLEM, SPACE, f"{text}, so no ledger can be created", remedy)
    return Finding(NOTE if free < _LOW_BYTES else OK, SPACE, text)


def _is_removed_at_log_out(path: str) -> bool:
    """Return whether systemd-logind's RemoveIPC may apply: a person's folder in /dev/shm, without lingering."""
    import pwd  # noqa: PLC0415 - for this check only

    if not path.startswith("/dev/shm/") or not os.path.isdir("/run/systemd/system"):  # noqa: S108 - only looked at
        return False
    user = os.geteuid()
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        return False
    return user >= _FIRST_PERSON and not os.path.exists(f"/var/lib/systemd/linger/{name}")


_FIRST_PERSON = 1000
"""Where the ids of people begin; RemoveIPC spares system users."""
