"""Wheel, source distribution and editable install all give the same working package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "native", "kvcached"]
ENTRY_POINTS = """
from importlib.metadata import entry_points
for group in ("console_scripts", "vllm.general_plugins", "sglang.srt.plugins"):
    print(group, *[point.value for point in entry_points(group=group) if point.value.startswith("kvcached")])
from kvcached import _native
import kvcached.control
print(_native.library_version(), _native.LIBRARY_PATH)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy the sources, without anything that was built in place."""
    copy = tmp_path / "tree"
    copy.mkdir()
    ignore = shutil.ignore_patterns("*.so", "_declarations.py", "__pycache__")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignore)
        else:
            shutil.copy(source, copy / name)
    return copy


def backend(tree: Path, call: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call setuptools' build backend in the tree, as pip does."""
    code = f"import setuptools.build_meta as backend; print(backend.{call})"
    environ = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environ, capture_output=True, text=True, check=False
    )


def build(tree: Path, hook: str) -> Path:
    """Build with a hook of the backend, and return what it made."""
    result = backend(tree, f"{hook}('dist')")
    assert result.returncode == 0, result.stderr
    return tree / "dist" / result.stdout.split()[-1]


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a fresh environment that has nothing but cffi's runtime; return its interpreter."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True, capture_output=True)
    import _cffi_backend  # noqa: PLC0415 - to find its file

    packages = next((folder / "lib").glob("python*/site-packages"))
    shutil.copy(_cffi_backend.__file__, packages)
    return python


def unpack_sdist(archive: Path) -> Path:
    """Unpack a source distribution and return its folder."""
    shutil.unpack_archive(archive, archive.parent, filter="data")
    return archive.parent / archive.name.removesuffix(".tar.gz")


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_every_kind_of_install_works(kind: str, tree: Path, tmp_path: Path) -> None:
    """The library loads, both plugins and the console script are announced, whichever way it was installed."""
    if kind == "sdist":
        tree = unpack_sdist(build(tree, "build_sdist"))
    wheel = build(tree, "build_editable" if kind == "editable" else "build_wheel")
    if kind != "editable":
        assert wheel.name.split("-")[2:4] == ["py3", "none"]
    python = install(wheel, tmp_path / "venv")
    output = subprocess.run([python, "-c", ENTRY_POINTS], cwd="/", capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[:3] == [
        "console_scripts kvcached.control.__main__:main",
        "vllm.general_plugins kvcached.engines.vllm:register",
        "sglang.srt.plugins kvcached.engines.sglang:register",
    ]
    assert output.splitlines()[3].startswith(f"layout True {tree if kind == 'editable' else tmp_path / 'venv'}")


def test_missing_compiler_is_one_clear_sentence(tree: Path) -> None:
    """Without a C compiler the build says what is missing and how to get it."""
    result = backend(tree, "build_wheel('dist')", PATH="/nonexistent")
    assert result.returncode != 0
    line = result.stderr.strip().splitlines()[-1]
    assert "no C compiler found (looked for cc, gcc, clang)" in line
    assert "apt-get install gcc" in line


def test_compiler_can_be_chosen(tree: Path) -> None:
    """A compiler named by CC is used, and a wrong name is said."""
    result = backend(tree, "build_wheel('dist')", CC="no-such-compiler")
    assert "looked for no-such-compiler" in result.stderr
