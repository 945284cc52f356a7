"""Runs a program in a sandbox without open-file-description locks: ``no_locks.py PROGRAM ARGUMENTS``.

A seccomp filter lets fcntl answer EINVAL to F_OFD_GETLK, F_OFD_SETLK and F_OFD_SETLKW, as gVisor and others do. x86-64.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

LOAD, JUMP_EQUAL, JUMP_ABOVE, RETURN = 0x20, 0x15, 0x25, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000 | 22
FCNTL, FIRST, LAST = 72, 36, 38
NUMBER_AT, COMMAND_AT = 0, 24
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


class Program(ctypes.Structure):
    """A filter as the kernel takes it."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def forbid_locks() -> None:
    """Forbid the locks for this process and all that it starts."""
    steps = [
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_EQUAL, 0, 4, FCNTL),
        (LOAD, 0, 0, COMMAND_AT),
        (JUMP_ABOVE, 2, 0, LAST),
        (JUMP_ABOVE, 0, 1, FIRST - 1),
        (RETURN, 0, 0, FAIL),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = Program(len(steps), ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid_locks()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - a test's own program
