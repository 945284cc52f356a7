"""The list of what the plugin relies on, against the release that it was written for."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import sglang
from sglang_server import HERE

ROOT = HERE.parent.parent.parent


@pytest.mark.skipif(version("sglang") != "0.5.23", reason="the list is that of 0.5.23")
def test_every_name_of_the_list_is_in_the_release() -> None:
    """A release compared with itself has no name that is nowhere."""
    packages = str(Path(sglang.__file__).parent.parent)
    command = [str(ROOT / "scripts" / "compare-releases"), "sglang", packages, packages]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
