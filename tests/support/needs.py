"""What some tests need and a machine may lack: elsewhere they are skipped then, on CI they fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import NoReturn

import pytest


def lack(what: str) -> NoReturn:
    """Skip the running test for want of ``what``; with CI=true in the environment, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing, and on CI nothing is skipped for want of a package", pytrace=False)
    pytest.skip(f"needs {what}")


def need_program(program: str, package: str) -> None:
    """Go on only where ``program`` is on the PATH; ``package`` is the Debian package that has it."""
    if shutil.which(program) is None:
        lack(f"{program} (Debian: apt-get install {package})")


def need_module(module: str) -> None:
    """Go on only where the Python module can be imported."""
    if importlib.util.find_spec(module) is None:
        lack(f"the Python package {module}")
