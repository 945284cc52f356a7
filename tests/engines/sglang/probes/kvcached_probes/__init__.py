"""Probes that tests put into SGLang's scheduler processes: a plugin beside the one under test.

``KVCACHED_PROBES`` names the modules of this package to install, ``KVCACHED_PROBE_DIR`` a folder that they share with
the test.
"""

from __future__ import annotations

import importlib
import os
import sys


def register() -> None:
    """Install the probes that the environment names; SGLang calls this in each of its processes."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    for name in filter(None, os.environ.get("KVCACHED_PROBES", "").split(",")):
        importlib.import_module(f"kvcached_probes.{name}").install()
