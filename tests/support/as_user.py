"""Runs the command line or a toy engine as another user: ``as_user.py UID:GID[,GROUP...] control|engine ARGUMENTS``.

The interpreter and this project may lie where other users cannot read, so everything that could be imported later is
imported before the change of user. Only root can run it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
from pathlib import Path

import kvcached.control
from kvcached.ledger import binding

DRAWING = ("kvcached.control.rendering.curve_picture",)
"""What only draws: its library wants to write into a home of its own."""


def main() -> int:
    """Change the user, then run what was asked for."""
    user, kind, *arguments = sys.argv[1:]
    preload()
    uid, _, groups = user.partition(":")
    gid, *others = [int(group) for group in groups.split(",")]
    os.setgroups(others)
    os.setgid(gid)
    os.setuid(int(uid))
    if kind == "control":
        return int(importlib.import_module("kvcached.control.commands.command_line").main(arguments))
    sys.argv = ["toy_engine.py", *arguments]
    importlib.import_module("toy_engine").main()
    return 0


def preload() -> None:
    """Import whatever the program could come to import."""
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.import_module("toy_engine")
    for module in pkgutil.walk_packages(kvcached.control.__path__, "kvcached.control."):
        if module.name not in DRAWING:
            with contextlib.suppress(ImportError):  # an optional package is not here: nobody will import this one
                importlib.import_module(module.name)
    binding.library_version()
    for name in ("json", "locale", "shutil", "textwrap"):
        importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
