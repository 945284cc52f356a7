"""Fixtures for tests against real SGLang servers; run by ``scripts/test --engines sglang``."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

import pytest
import sglang_server
from sglang_model import write_model
from sglang_server import Server, write_probe_entry_point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Serve = Callable[..., Server]
    Say = Callable[[str], None]

if sglang_server.needs_old_release_shim():
    runpy.run_path(str(sglang_server.OLD_RELEASES / "sitecustomize.py"))

_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Say:
    """Return a function that adds a figure to the end of the run's report."""
    figures = request.config.stash.setdefault(_FIGURES, [])

    def add(figure: str) -> None:
        figures.append(f"{request.node.name}: {figure}")

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures that the tests saw."""
    figures = config.stash.get(_FIGURES, [])
    if figures:
        terminalreporter.section("figures")
        for figure in figures:
            terminalreporter.line(figure)


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that is a config file only, for SGLang's dummy weights: all outputs are alike."""
    return write_model(tmp_path_factory.mktemp("plain-model"), weights=False)


@pytest.fixture(scope="session")
def weighted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights, whose outputs depend on the prompt."""
    return write_model(tmp_path_factory.mktemp("weighted-model"), weights=True)


@pytest.fixture(scope="session")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that makes the test probes an SGLang plugin when it is on the path."""
    return write_probe_entry_point(tmp_path_factory.mktemp("probes"))


@pytest.fixture
def serve(tmp_path: Path, probes: Path) -> Iterator[Serve]:
    """Start servers under ``tmp_path`` and end them with the test."""
    yield from serving(tmp_path, probes)


@pytest.fixture(scope="module")
def serve_module(tmp_path_factory: pytest.TempPathFactory, probes: Path) -> Iterator[Serve]:
    """Start servers that all tests of a module share."""
    yield from serving(tmp_path_factory.mktemp("servers"), probes)


def serving(folder: Path, probes: Path) -> Iterator[Serve]:
    """Yield a function that starts a server; end all of them afterwards."""
    servers: list[Server] = []

    def start(model: Path, *options: str, **more: object) -> Server:
        server = Server(model, folder / f"server-{len(servers)}", probes, options, **more)  # type: ignore[arg-type]
        servers.append(server)
        server.start()
        return server

    try:
        yield start
    finally:
        for server in servers:
            server.stop()
