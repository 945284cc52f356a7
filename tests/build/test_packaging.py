"""Wheel, source distribution and editable install all give the same working package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "native", "kvcached"]
ENTRY_POINTS = """
from importlib.metadata import entry_points
for group in ("console_scripts", "vllm.general_plugins", "sglang.srt.plugins"):
    print(group, *sorted(one.value for one in entry_points(group=group) if one.value.startswith("kvcached")))
from kvcached.ledger import binding
import kvcached.control
print(binding.library_version(), binding.LIBRARY_PATH)
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
    """The library loads, both plugins and both console scripts are announced, whichever way it was installed."""
    if kind == "sdist":
        tree = unpack_sdist(build(tree, "build_sdist"))
    wheel = build(tree, "build_editable" if kind == "editable" else "build_wheel")
    if kind != "editable":
        assert wheel.name.split("-")[2:4] == ["py3", "none"]
    python = install(wheel, tmp_path / "venv")
    output = subprocess.run([python, "-c", ENTRY_POINTS], cwd="/", capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[:3] == [
        "console_scripts kvcached.control.__main__:main kvcached.fleet.__main__:main",
        "vllm.general_plugins kvcached.engines.vllm:register",
        "sglang.srt.plugins kvcached.engines.sglang:register",
    ]
    place = tree if kind == "editable" else tmp_path / "venv"
    assert output.splitlines()[3].startswith(f"interface 3, ledger version 3 {place}")


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


def library_in(wheel: Path) -> bytes:
    """Return the native library of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read("kvcached/ledger/libkvledger.so")


def test_distribution_has_a_name_and_a_version_of_its_own(tree: Path) -> None:
    """The wheel bears a name that is not the registry's other project's, and the package's version."""
    version = re.search(r'__version__ = "(.*)"', (tree / "kvcached" / "__init__.py").read_text())
    assert version is not None
    assert build(tree, "build_wheel").name.startswith(f"kvcached_control-{version[1]}-py3-none-")


@pytest.mark.parametrize("page", ["README.md", "docs", "kvcached", "scripts", "CONTRIBUTING.md", "pyproject.toml"])
def test_nothing_names_a_command_that_installs_the_other_project(page: str) -> None:
    """No text or message tells anybody to install something called plainly kvcached."""
    path = ROOT / page
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.suffix in {".py", ".md", ".yaml", ""}]
    for file in files:
        if file.is_file():
            text = file.read_text(errors="replace")
            found = re.findall(r"pip3? install[^\n`]*?[ '\"]kvcached(?![-\w/.])[^\n]*", text)
            assert not found, f"{file}: {found}"
            assert "'kvcached[" not in text, file


def test_flags_of_distributors_are_honoured(tree: Path, tmp_path: Path) -> None:
    """CPPFLAGS, CFLAGS and LDFLAGS reach the compiler, and nonsense in them fails the build."""
    log = tmp_path / "log"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec cc "$@"\n')
    compiler.chmod(0o755)
    flags = {"CPPFLAGS": "-DDISTRO=1", "CFLAGS": "-O1 -fno-omit-frame-pointer", "LDFLAGS": "-Wl,-z,separate-code"}
    assert backend(tree, "build_wheel('dist')", CC=str(compiler), **flags).returncode == 0
    lines = [line for line in log.read_text().splitlines() if "-shared" in line]
    assert lines
    assert all(flag in line for line in lines for flag in " ".join(flags.values()).split())
    assert "-Werror" not in lines[0]
    for name in flags:
        assert backend(tree, "build_wheel('dist')", **{name: "-fno-such-flag-anywhere"}).returncode != 0, name


def test_a_warning_is_fatal_only_where_it_is_ours(tree: Path) -> None:
    """A user's build survives a newer compiler's warning; the project's own does not."""
    source = tree / "native" / "bell.c"
    source.write_text(source.read_text() + "\nstatic int unused_on_purpose(void) { return 1; }\n")
    assert backend(tree, "build_wheel('dist')", KVCACHED_WERROR="").returncode == 0
    result = backend(tree, "build_wheel('dist')", KVCACHED_WERROR="1")
    assert result.returncode != 0
    assert "unused_on_purpose" in result.stderr


def test_library_is_the_same_wherever_it_is_built(tree: Path, tmp_path: Path) -> None:
    """The same sources give the same bytes in another folder, and neither folder's name is in them."""
    other = tmp_path / "quite" / "another" / "place"
    shutil.copytree(tree, other)
    one, two = (library_in(build(where, "build_wheel")) for where in (tree, other))
    assert one == two
    assert str(tmp_path).encode() not in one


def test_what_an_earlier_build_left_is_not_shipped(tree: Path) -> None:
    """After a module was renamed a wheel holds it under the new name only."""
    build(tree, "build_wheel")
    (tree / "kvcached" / "ledger" / "ownership.py").rename(tree / "kvcached" / "ledger" / "renamed.py")
    with zipfile.ZipFile(build(tree, "build_wheel")) as archive:
        names = set(archive.namelist())
    assert "kvcached/ledger/renamed.py" in names
    assert "kvcached/ledger/ownership.py" not in names


def test_source_distribution_holds_what_it_takes_to_build_test_and_read(tmp_path: Path) -> None:
    """Sources, tests and docs are in it; what a build made and the fuzzer's corpus are not."""
    copy = tmp_path / "checkout"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    folder = unpack_sdist(build(copy, "build_sdist"))
    for name in (
        "native/slot.c",
        "tests/conftest.py",
        "docs/operations.md",
        "docs/demo.png",
        "scripts/test",
        "LICENSE",
    ):
        assert (folder / name).is_file(), name
    assert not (folder / "native" / "fuzz" / "corpus").exists()
    assert not list(folder.rglob("*.so"))


def test_unbuilt_checkout_says_what_it_is(tree: Path) -> None:
    """Started in a checkout in which nothing was built, the command says that, and what to do."""
    command = [sys.executable, "-m", "kvcached.control", "set", "5", "--instance", "a", "--ledger-dir", str(tree)]
    (tree / "cpu-0.ledger").touch()
    tree.chmod(0o700)
    result = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert f"{tree} is a source checkout without a build" in result.stderr
    assert f"run from another folder, or build it with pip install -e {tree}" in result.stderr
