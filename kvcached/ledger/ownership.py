"""Whom a directory or a file belongs to, and whether that is to be trusted."""

from __future__ import annotations

import os
import stat

OTHERS_WRITE = 0o002
GROUP_WRITE = 0o020


def directory_problem(status: os.stat_result, *, is_default: bool, writable: bool) -> str:
    """Return why a directory may not be used, or an empty text.

    The default directory lies in a folder where everybody may create names, so it must be one's own. A directory that
    was named explicitly may belong to root, or to anyone if its group may write and one is a member. Root may use any.
    """
    where = describe(status.st_uid, status.st_mode)
    user = os.geteuid()
    if is_default and status.st_uid != user:
        return f"belongs to another user{where}; remove it or set KVCACHED_LEDGER_DIR"
    if not writable:
        return ""
    if status.st_mode & OTHERS_WRITE:
        return f"is writable by everyone{where}; chmod o-w it, or choose another one"
    shared = status.st_mode & GROUP_WRITE and status.st_gid in {os.getegid(), *os.getgroups()}
    if user != 0 and status.st_uid not in {0, user} and not shared:
        return f"belongs to another user{where}, and not to a group that shares it with you"
    return ""


def ownership(path: str) -> str:
    """Return owner and mode of what is at ``path``, for an error message; empty if nothing does."""
    try:
        found = os.lstat(path)
    except OSError:
        return ""
    return describe(found.st_uid, found.st_mode)


def describe(uid: int, mode: int) -> str:
    """Return owner and mode as error messages show them."""
    return f" (owner uid {uid}, mode {stat.S_IMODE(mode):04o})" if mode else ""
