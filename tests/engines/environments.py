"""Make the virtual environments of the real engines and run their suites there.

Called by ``scripts/test --engines``; needs python3 with pip and venv, a C compiler, and a package registry.

What an engine needs is said in ``tests/engines/<engine>/environment.json``:

- ``distribution`` and ``default``: the package on the registry and the release the suite is written for,
- ``requirements``: a file of pinned requirements, relative to the JSON file,
- ``torch``: the requirements installed before all others (``KVCACHED_TEST_TORCH_<ENGINE>`` replaces them, separated by
  spaces, for a machine that has another build),
- ``versions``: the releases that ``=all`` runs; each may name another ``torch``.

The default release gets a complete environment, ``.venvs/<engine>``. Any other release is unpacked into a directory of
its own that stands first on PYTHONPATH, over the pinned requirements of the default release and the torch it asks for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENVS = ROOT / ".venvs"
TEST_REQUIREMENTS = ("cffi>=1.17", "setuptools", "pytest>=9", "pytest-xdist>=3.8")
PROJECT_SOURCES = ("pyproject.toml", "setup.py", "README.md", "native", "kvcached")
SOURCE_SUFFIXES = (".py", ".c", ".h", ".toml", ".map", ".md", ".typed")


@dataclass(frozen=True)
class Engine:
    """One engine and all that its environments are made of."""

    name: str
    distribution: str
    default: str
    requirements: Path
    torch: tuple[str, ...]
    versions: dict[str, dict[str, list[str]]]

    def torch_of(self, version: str) -> tuple[str, ...]:
        """Return the requirements of torch for ``version``."""
        forced = os.environ.get(f"KVCACHED_TEST_TORCH_{self.name.upper()}")
        if forced:
            return tuple(forced.split())
        return tuple(self.versions.get(version, {}).get("torch", self.torch))


def read_engine(name: str) -> Engine:
    """Read ``tests/engines/<name>/environment.json``."""
    path = HERE / name / "environment.json"
    data = json.loads(path.read_text())
    return Engine(
        name=name,
        distribution=data["distribution"],
        default=data["default"],
        requirements=(path.parent / data["requirements"]).resolve(),
        torch=tuple(data["torch"]),
        versions=data["versions"],
    )


def known_engines() -> list[str]:
    """Return the names of all engines that have an ``environment.json``."""
    return sorted(path.parent.name for path in HERE.glob("*/environment.json"))


def pip(python: Path, *arguments: str) -> None:
    """Run pip of the environment that ``python`` belongs to; its output goes to ours."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def stamped(directory: Path, stamp: str, name: str = ".stamp") -> bool:
    """Return whether ``directory`` was completed with exactly this ``stamp``."""
    path = directory / name
    return path.is_file() and path.read_text() == stamp


def make_base(engine: Engine, version: str) -> Path:
    """Make the environment with torch and the pinned requirements, if it is not there; return its Python."""
    torch = engine.torch_of(version)
    if torch == engine.torch_of(engine.default):
        directory = VENVS / engine.name
    else:
        directory = VENVS / f"{engine.name}-{torch[0].replace('==', '-')}"
    python = directory / "bin" / "python"
    stamp = "\n".join([sys.version, engine.default, *torch, engine.requirements.read_text(), *TEST_REQUIREMENTS])
    if stamped(directory, stamp):
        return python
    print(f"making {directory.relative_to(ROOT)}", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True, symlinks=True)
    pip(python, *torch)
    pip(python, *torch, "-r", str(engine.requirements), *TEST_REQUIREMENTS)  # torch again, lest it be replaced
    pip(python, "--no-deps", f"{engine.distribution}=={engine.default}")
    (directory / ".stamp").write_text(stamp)
    return python


def make_overlay(engine: Engine, version: str, python: Path) -> Path | None:
    """Unpack a release other than the default into a directory for PYTHONPATH; return it, or None for the default."""
    if version == engine.default:
        return None
    directory = VENVS / f"{engine.name}-{version}"
    if not stamped(directory, version):
        shutil.rmtree(directory, ignore_errors=True)
        pip(python, "--no-deps", "--target", str(directory), f"{engine.distribution}=={version}")
        (directory / ".stamp").write_text(version)
    return directory


def project_fingerprint() -> str:
    """Return a hash over the sources that the project is built from."""
    digest = hashlib.sha256()
    for source in (ROOT / name for name in PROJECT_SOURCES):
        files = sorted(source.rglob("*")) if source.is_dir() else [source]
        for path in files:
            if path.is_file() and path.suffix in SOURCE_SUFFIXES:
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def install_project(python: Path) -> None:
    """Install this project as a user gets it, a built wheel, unless its sources did not change since the last time."""
    directory = python.parent.parent
    fingerprint = project_fingerprint()
    if stamped(directory, fingerprint, ".project-stamp"):
        return
    # Environments from before the distribution had a name of its own announce the plugin under both names.
    uninstall = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "kvcached"]
    subprocess.run(uninstall, check=False, capture_output=True)
    pip(python, "--no-deps", "--no-build-isolation", "--force-reinstall", str(ROOT))
    (directory / ".project-stamp").write_text(fingerprint)


def names_tests(arguments: list[str]) -> bool:
    """Return whether pytest is told what to run, as in ``vllm/test_faults.py::test_name``: relative to this folder."""
    return any((HERE / argument.partition("::")[0]).is_file() for argument in arguments)


def run_suite(engine: Engine, version: str, arguments: list[str], *, prepare_only: bool) -> int:
    """Prepare the environment of one release and run the engine's suite in it; return pytest's exit status."""
    try:
        python = make_base(engine, version)
        overlay = make_overlay(engine, version, python)
        install_project(python)
    except subprocess.CalledProcessError as error:
        print(f"{engine.name} {version}: no environment: {error}", flush=True)
        return 1
    if prepare_only:
        return 0
    environment = dict(os.environ, PYTHONSAFEPATH="1", KVCACHED_TEST_ENGINE_VERSION=version)
    environment.pop("PYTHONPATH", None)
    if overlay is not None:
        environment["PYTHONPATH"] = str(overlay)
    command = [str(python), "-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", str(ROOT)]
    command += [*arguments] if names_tests(arguments) else [str(HERE / engine.name), *arguments]
    return subprocess.run(command, check=False, env=environment, cwd=HERE).returncode


def select(words: list[str]) -> list[tuple[Engine, str]]:
    """Turn ``vllm``, ``vllm=VERSION`` and ``vllm=all`` into engines and releases; no words mean every engine."""
    selected: list[tuple[Engine, str]] = []
    for word in words or known_engines():
        name, _, version = word.partition("=")
        if name not in known_engines():
            message = f"no engine {name!r}; there are: {', '.join(known_engines())}"
            raise SystemExit(message)
        engine = read_engine(name)
        versions = list(engine.versions) if version == "all" else [version or engine.default]
        selected.extend((engine, each) for each in versions)
    return selected


def main() -> int:
    """Run the selected suites one after the other; exit 0 only if all passed."""
    parser = argparse.ArgumentParser(prog="scripts/test --engines")
    parser.add_argument("engines", nargs="*", metavar="ENGINE[=VERSION|=all]")
    parser.add_argument("--prepare-only", action="store_true", help="make the environments, run nothing")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    results = [
        (engine.name, version, run_suite(engine, version, words[cut + 1 :], prepare_only=options.prepare_only))
        for engine, version in select(options.engines)
    ]
    if len(results) > 1:
        for name, version, status in results:
            print(f"{name} {version}: {'ok' if status == 0 else f'failed (pytest exit status {status})'}")
    return max((status for *_, status in results), default=0)


if __name__ == "__main__":
    sys.exit(main())
