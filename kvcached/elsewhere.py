"""Where else on this machine ledgers may be: for who looked in one directory and found nothing."""

from __future__ import annotations

import os

from kvcached.settings import default_ledger_dir


def elsewhere(path: str) -> str:
    """Return a remark that names the other users' default ledger directories, or an empty text if there are none."""
    others = other_default_dirs(path)
    return f"; other ledger directories here: {', '.join(others)}" if others else ""


def other_default_dirs(path: str) -> list[str]:
    """Return the default ledger directories of this machine apart from ``path``, as far as one may see them."""
    parent, prefix = os.path.split(default_ledger_dir().rstrip("0123456789"))
    try:
        found = sorted(f"{parent}/{name}" for name in os.listdir(parent) if name.startswith(prefix))
    except OSError:
        return []
    return [other for other in found if other != path and os.path.isdir(other)]
