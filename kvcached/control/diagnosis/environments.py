"""What is installed where a process runs: its Python's package folders, and whose ``kvcached`` is in them."""

from __future__ import annotations

import glob
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.control.diagnosis.processes import Process

DISTRIBUTION = "kvcached-control"
"""What this package is called where packages are installed from. ``kvcached`` is another project there."""

OWN_ENTRY_POINT = "kvcached.engines."
"""What only this project's distribution announces to engines."""


def package_folders(process: Process) -> list[str]:
    """Return the package folders of a process's Python, as far as its command line and environment tell.

    They are looked up as the process sees them, which matters for one in a container. Empty if nothing is known.
    """
    root = f"/proc/{process.pid}/root"
    prefix = python_prefix(process)
    patterns = [*_below(prefix), *_below(_base_of(root, prefix))] if prefix else []
    if not patterns:
        return []
    environ = process.environ
    base = environ.get("PYTHONUSERBASE") or f"{environ.get('HOME', '')}/.local"
    if base.startswith("/"):
        patterns.append(f"{glob.escape(base)}/lib/python3*/site-packages")
    patterns += [glob.escape(folder) for folder in environ.get("PYTHONPATH", "").split(":") if folder.startswith("/")]
    return [folder for pattern in patterns for folder in glob.glob(root + pattern) if os.path.isdir(folder)]


def python_prefix(process: Process) -> str:
    """Return where the Python of a process is installed; empty if that cannot be told."""
    for program in [*process.arguments[:2], process.executable]:
        folder, _, name = program.rpartition("/")
        if folder.endswith("/bin") and (name.startswith("python") or name in ("vllm", "sglang")):
            return folder.removesuffix("/bin") or "/"
    return process.environ.get("VIRTUAL_ENV", "")


def python_program(process: Process) -> str:
    """Return the interpreter of a process, to name in a remedy."""
    first = process.arguments[0] if process.arguments else ""
    if first.startswith("/") and os.path.basename(first).startswith("python"):
        return first
    return process.executable or "its Python"


def _below(prefix: str) -> list[str]:
    """Return patterns for the package folders of a prefix: of Python itself, and of Debian's and Ubuntu's."""
    if not prefix:
        return []
    start = "" if prefix == "/" else glob.escape(prefix)
    folders = ["lib/python3*/site-packages", "lib64/python3*/site-packages", "lib/python3*/dist-packages"]
    folders += ["local/lib/python3*/dist-packages", "lib/python3/dist-packages"]
    return [f"{start}/{folder}" for folder in folders]


def _base_of(root: str, prefix: str) -> str:
    """Return the prefix of the Python that a virtual environment was made from, if it may use its packages."""
    try:
        with open(f"{root}{prefix}/pyvenv.cfg", encoding="utf-8", errors="replace") as file:
            lines = dict(line.split("=", 1) for line in file.read().splitlines() if "=" in line)
    except OSError:
        return ""
    settings = {name.strip(): value.strip() for name, value in lines.items()}
    shared = settings.get("include-system-site-packages", "").lower() == "true"
    return settings.get("home", "").removesuffix("/bin") if shared else ""


def owners(folders: list[str]) -> Iterator[tuple[bool, str]]:
    """Yield each distribution here that brings a ``kvcached``: whether it is this project's, and its name."""
    for folder in folders:
        for info in glob.glob(f"{glob.escape(folder)}/kvcached*-*.*-info"):
            name = os.path.basename(info).rpartition(".")[0]
            yield _is_own(info), name


def _is_own(info: str) -> bool:
    try:
        with open(f"{info}/entry_points.txt", encoding="utf-8", errors="replace") as file:
            return OWN_ENTRY_POINT in file.read()
    except OSError:
        return False
