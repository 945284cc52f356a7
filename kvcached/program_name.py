"""What the running program is called, for the record of publications."""

from __future__ import annotations

import os
import sys

OWN_PACKAGE = "kvcached.control"
OWN_NAME = "kvcached-control"


def program_name() -> str:
    """Return the name of the running program as its user would know it: a command, a module, or ``python``."""
    path = sys.argv[0] if getattr(sys, "argv", None) else ""
    name = os.path.basename(path.rstrip("/"))
    if name == "__main__.py":
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        package = spec.parent if spec is not None else ""
        folder = os.path.basename(os.path.dirname(path))  # of the path as given: the working directory may be gone
        return OWN_NAME if package == OWN_PACKAGE else package or folder or "python"
    return "python" if name in ("", "-c", "-m") else name
