"""Fixtures for the tests on real vLLM engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from vllm_models import PLAIN, write_config

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama without weights."""
    return write_config(PLAIN, tmp_path_factory.mktemp("llama"))
