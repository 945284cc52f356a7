"""Compare two releases of an engine at every name that the plugins rely on. Called by ``scripts/compare-releases``.

The names are in ``tests/engines/<engine>/relied-on.txt``: a file and a dotted name a line. The sources are read, never
imported, so no engine has to be installed and a release for other hardware will do.

Exit status: 0 if nothing that is relied on has changed, 1 if something has, 2 for wrong usage or a release that cannot
be read.
"""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from definitions import Definition, Sources

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "tests" / "engines"
CACHE = ROOT / ".venvs" / "releases"
LONG_LINE = 100


@dataclass(frozen=True)
class Name:
    """Something of an engine that the plugins rely on: a file, relative to the wheel's root, and a name in it."""

    file: str
    dotted: str

    @property
    def package(self) -> str:
        """The engine's top-level package."""
        return self.file.partition("/")[0]


@dataclass(frozen=True)
class Change:
    """What became of a name: the kind in a word, and all there is to see."""

    name: Name
    kind: str
    text: str = ""


class UnreadableReleaseError(Exception):
    """A release that cannot be had or read; the message says why."""


def read_names(path: Path) -> list[Name]:
    """Read a list of names; ``#`` begins a comment."""
    lines = (line.partition("#")[0].split() for line in path.read_text().splitlines())
    return [Name(*words) for words in lines if words]


def compare(names: list[Name], old: Sources, new: Sources) -> Iterator[Change]:
    """Yield what changed from ``old`` to ``new``, in the order of ``names``."""
    for name in names:
        before, after = old.find(name.file, name.dotted), new.find(name.file, name.dotted)
        if before is None and after is None:
            yield Change(name, "unknown", "is in neither release at this place: correct the list of names")
        elif before is None:
            places = old.search(name.dotted, name.package)
            text = f"from {', '.join(places)}" if places else "is in the newer release only"
            yield Change(name, "moved" if places else "new", text)
        elif after is None:
            yield from _follow(name, before, new)
        else:
            yield from _differ(name, before, after)


def _follow(name: Name, before: Definition, new: Sources) -> Iterator[Change]:
    """Yield where a name went, and what changed on the way."""
    places = new.search(name.dotted, name.package)
    if not places:
        yield Change(name, "gone")
        return
    yield Change(name, "moved", "to " + ", ".join(places))
    after = new.find(places[0], name.dotted)
    if after is not None and len(places) == 1:
        yield from _differ(name, before, after)


def _differ(name: Name, before: Definition, after: Definition) -> Iterator[Change]:
    if before.signature != after.signature:
        yield Change(name, "signature", _diff(before.signature, after.signature))
    if before.body != after.body:
        yield Change(name, "body", _diff(before.body, after.body))


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(_split(before), _split(after), lineterm="", n=2)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def _split(text: str) -> list[str]:
    """Return lines, the long ones cut at their commas: a change in one argument of twenty has to be seen."""
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines += line.replace(", ", f",\n{indent}").splitlines() if len(line) > LONG_LINE else [line]
    return lines


def locate(engine: str, wanted: str, cache: Path) -> Path:
    """Return the folder or wheel of a release, downloaded if ``wanted`` is a version."""
    if Path(wanted).exists():
        return Path(wanted)
    if "/" in wanted or wanted.endswith(".whl"):
        message = f"{wanted}: no such file or folder"
        raise UnreadableReleaseError(message)
    requirements = [wanted]
    if "==" not in wanted:
        environment = ENGINES / engine / "environment.json"
        known = [json.loads(environment.read_text())["distribution"]] if environment.is_file() else []
        requirements = [f"{name}=={wanted}" for name in dict.fromkeys([*known, engine])]
    for requirement in requirements:
        folder = cache / requirement
        if not list(folder.glob("*.whl")):
            _download(requirement, folder)
        wheels = list(folder.glob("*.whl"))
        if wheels:
            return wheels[0]
    message = f"no wheel of {' or '.join(requirements)} can be downloaded; give the path of one, or of it unpacked"
    raise UnreadableReleaseError(message)


def _download(requirement: str, folder: Path) -> None:
    print(f"downloading {requirement}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=False, stderr=subprocess.DEVNULL)


def show(change: Change) -> str:
    """Return a change as text."""
    head = f"{change.kind:<10} {change.name.file}: {change.name.dotted}"
    if "\n" not in change.text:
        return f"{head} {change.text}".rstrip()
    return head + "\n" + "\n".join("    " + line for line in change.text.splitlines())


def main() -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/compare-releases", description=__doc__.partition("\n")[0])
    parser.add_argument("engine", help="vllm or sglang")
    parser.add_argument("old", help="a version, DISTRIBUTION==VERSION, a wheel, or the folder of an unpacked wheel")
    parser.add_argument("new")
    parser.add_argument("--names", type=Path, help="the list of names (default: tests/engines/ENGINE/relied-on.txt)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where downloaded wheels are kept")
    options = parser.parse_args()
    try:
        names = read_names(options.names or ENGINES / options.engine / "relied-on.txt")
        old, new = (Sources(locate(options.engine, each, options.cache)) for each in (options.old, options.new))
        changes = list(compare(names, old, new))
    except (OSError, zipfile.BadZipFile, SyntaxError, TypeError, UnreadableReleaseError) as error:
        print(f"scripts/compare-releases: {error}", file=sys.stderr)
        return 2
    for change in changes:
        print(show(change))
    kinds = Counter(change.kind for change in changes)
    summary = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing changed"
    print(f"{options.engine} {options.old} -> {options.new}: {len(names)} names, {summary}")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
