"""The comparison of two releases of an engine, on made-up ones, and the lists of names that it goes through."""

from __future__ import annotations

import importlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvcached.engines.sglang import hook_places as sglang_targets
from kvcached.engines.sglang import launching, sglang_request_events
from kvcached.engines.vllm import relied_on as vllm_targets

ROOT = Path(__file__).parent.parent.parent
ENGINES = ROOT / "tests" / "engines"

OLD = {
    "engine/core.py": '''
"""The core."""
import dataclasses

LIMIT: int = 1

@dataclasses.dataclass
class Params:
    """Parameters."""
    tokens: int = 0

class Pool:
    def __init__(self, size):
        self.free, self.size = size, size
        if size:
            self.queue = []

    def take(self, count: int) -> int:
        """Take some."""
        # first come, first served
        return self.free - count

    def drop(self): return None

try:
    import fast
except ImportError:
    def walk(tree): return list(tree)
''',
    "engine/cache.py": "class Cache:\n    def evict(self, tokens): return tokens\n",
}
NAMES = """
engine/core.py   LIMIT          # a comment
engine/core.py   Params
engine/core.py   Pool
engine/core.py   Pool.free
engine/core.py   Pool.queue
engine/core.py   Pool.take
engine/core.py   Pool.drop
engine/core.py   walk
engine/cache.py  Cache.evict
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def run(tmp_path: Path, new: Path, names: str = NAMES, old: Path | None = None) -> tuple[int, list[str], str]:
    """Compare with the old release; returns exit status, the lines without details, and all of the output."""
    listed = tmp_path / "names.txt"
    listed.write_text(names)
    old = old or write(tmp_path / "old", OLD)
    command = [ROOT / "scripts" / "compare-releases", "engine", old, new, "--names", listed, "--cache", tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    text = ran.stdout + ran.stderr
    return ran.returncode, [line for line in text.splitlines() if not line.startswith(" ")], text


def changed(**edits: str) -> dict[str, str]:
    """Return the old release with some texts of its core replaced."""
    core = OLD["engine/core.py"]
    for before, after in edits.items():
        assert before in core, before
        core = core.replace(before, after)
    return {**OLD, "engine/core.py": core}


def test_layout_comments_and_docstrings_are_no_change(tmp_path: Path) -> None:
    """A release that only reads differently exits 0, whatever moved around the names relied on."""
    core = (
        OLD["engine/core.py"]
        .replace("        # first come, first served\n", "\n\n")
        .replace('"""Take some."""', '"""Take as many\n        as there are."""')
        .replace("return self.free - count", "return (self.free\n                - count)")
        .replace("class Pool:", "class Other:\n    pass\n\nclass Pool:")
    )
    code, lines, _ = run(tmp_path, write(tmp_path / "new", {**OLD, "engine/core.py": core}))
    assert (code, len(lines)) == (0, 1)
    assert lines[0].endswith("9 names, nothing changed")


@pytest.mark.parametrize(
    ("before", "after", "expected", "detail"),
    [
        ("count: int) -> int", "count: int, *, urgent=False) -> int", "signature  engine/core.py: Pool.take", "urgent"),
        ("self.free - count", "self.free + count", "body       engine/core.py: Pool.take", "+return self.free + count"),
        ("tokens: int = 0", "tokens: int = 1", "signature  engine/core.py: Params", "+    tokens: int = 1"),
        ("class Pool:", "class Pool(dict):", "signature  engine/core.py: Pool", "+class Pool(dict)"),
        ("LIMIT: int = 1", "LIMIT: int = 2", "body       engine/core.py: LIMIT", "+LIMIT: int = 2"),
        ("self.queue = []", "self.queue = ()", "body       engine/core.py: Pool.queue", "+self.queue = ()"),
        ("self.free, self.size =", "self.size, self.left =", "gone       engine/core.py: Pool.free", ""),
        ("def drop(self)", "async def drop(self)", "signature  engine/core.py: Pool.drop", "+async def"),
        (
            "def drop(self)",
            "@staticmethod\n    def drop(self)",
            "signature  engine/core.py: Pool.drop",
            "+@staticmethod",
        ),
        ("list(tree)", "[*tree]", "body       engine/core.py: walk", "+return [*tree]"),
    ],
)
def test_each_kind_of_change_is_found(tmp_path: Path, before: str, after: str, expected: str, detail: str) -> None:
    """What a name is called with and what it does are told apart, and the difference is shown."""
    code, lines, text = run(tmp_path, write(tmp_path / "new", changed(**{before: after})))
    assert code == 1
    assert expected in lines
    assert detail in text


def test_a_name_that_moved_is_followed(tmp_path: Path) -> None:
    """A definition found in another file is said to have moved there, with what changed on the way."""
    files = {"engine/core.py": OLD["engine/core.py"], "engine/tree/radix.py": OLD["engine/cache.py"] + "    # more\n"}
    code, lines, _ = run(tmp_path, write(tmp_path / "new", files))
    assert (code, lines[0]) == (1, "moved      engine/cache.py: Cache.evict to engine/tree/radix.py")
    assert len(lines) == 2
    files["engine/tree/radix.py"] = OLD["engine/cache.py"].replace("return tokens", "return 0")
    _, lines, text = run(tmp_path, write(tmp_path / "new", files))
    assert lines[1] == "body       engine/cache.py: Cache.evict"
    assert "+return 0" in text


def test_a_list_for_the_newer_release_finds_where_names_came_from(tmp_path: Path) -> None:
    """A name that the older release has elsewhere, or not at all, is told apart."""
    files = {"engine/core.py": OLD["engine/core.py"], "engine/tree.py": OLD["engine/cache.py"] + "def more(): pass\n"}
    names = "engine/tree.py Cache.evict\nengine/tree.py more\n"
    _, lines, _ = run(tmp_path, write(tmp_path / "new", files), names)
    assert lines[0] == "moved      engine/tree.py: Cache.evict from engine/cache.py"
    assert lines[1] == "new        engine/tree.py: more is in the newer release only"


def test_a_name_that_neither_release_has_is_a_mistake_in_the_list(tmp_path: Path) -> None:
    """A list that names what never was does not pass for one of which nothing changed."""
    code, lines, _ = run(tmp_path, write(tmp_path / "new", OLD), NAMES + "engine/core.py Pool.nothing\n")
    assert code == 1
    assert lines[0].startswith("unknown    engine/core.py: Pool.nothing is in neither release")


def test_wheels_are_read_without_being_unpacked_or_imported(tmp_path: Path) -> None:
    """A wheel will do in the place of a folder, and none of its code runs."""
    files = {**OLD, "engine/__init__.py": "raise SystemExit('imported')\n"}
    wheel = tmp_path / "engine-2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    assert run(tmp_path, wheel)[0] == 0


@pytest.mark.parametrize("content", [None, b"no wheel", b""])
def test_a_release_that_cannot_be_read_is_said_so(tmp_path: Path, content: bytes | None) -> None:
    """A missing, broken or unparsable release exits 2 with a sentence."""
    place = tmp_path / "broken.whl"
    if content is not None:
        place.write_bytes(content)
    code, lines, _ = run(tmp_path, place)
    assert code == 2
    assert lines[0].startswith("scripts/compare-releases: ")
    code, lines, _ = run(tmp_path, write(tmp_path / "new", {**OLD, "engine/core.py": "def broken(:\n"}))
    assert code == 2
    assert lines[0].startswith("scripts/compare-releases: ")


class Seen:
    """Stands in for a module of vLLM, or for anything in it, and remembers what was asked of it."""

    def __init__(self, name: str, names: set[str]) -> None:
        self._name = name
        self._names = names

    def __getattr__(self, attribute: str) -> Seen:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._names.add(f"{self._name}.{attribute}")
        return Seen(f"{self._name}.{attribute}", self._names)


def relied_on(engine: str) -> set[str]:
    """Return the names of an engine's list, dotted from the engine's package on."""
    found = set()
    for line in (ENGINES / engine / "relied-on.txt").read_text().splitlines():
        words = line.partition("#")[0].split()
        if words:
            module = words[0].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found.add(f"{module}.{words[1]}")
    return found


def test_the_list_of_vllm_names_all_that_is_looked_up_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the plugin resolves before it installs a hook is compared between releases."""
    names: set[str] = set()
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:  # noqa: ANN401 - a module, or what stands in for it
        return Seen(name, names) if name.partition(".")[0] == "vllm" else real(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    vllm_targets.resolve_targets()
    assert names
    missing = names - relied_on("vllm")
    # A class is listed by its members where it is only their owner.
    assert {name for name in missing if not any(each.startswith(name + ".") for each in relied_on("vllm"))} == set()


def test_the_list_of_sglang_names_all_that_is_looked_up_at_the_start() -> None:
    """Every target of a hook and every name used besides is compared, in whatever class it is written."""
    hooked = {
        *sglang_targets._LEADING_PARAMETERS,
        sglang_request_events.PREPARE,
        sglang_request_events.PREBUILT,
        sglang_request_events.FLUSH,
    }
    hooked |= {f"{launching.ENGINE_MODULE}.Engine.{launching.LAUNCH}"}
    hooked |= {f"{launching.RAY_ENGINE_MODULE}.RayEngine.{launching.LAUNCH}"}
    listed = relied_on("sglang")
    methods = {name.rpartition(".")[2] for name in listed}
    used = set(sglang_targets._USED)
    assert {name for name in hooked if name.rpartition(".")[2] not in methods} == set()
    assert {name for name in used if not any(f"{each}.".startswith(f"{name}.") for each in listed)} == set()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_lists_belong_to_engines_that_can_be_downloaded(engine: str) -> None:
    """Each list lies beside the file that says what the engine's distribution is called."""
    assert json.loads((ENGINES / engine / "environment.json").read_text())["distribution"]
    assert len(relied_on(engine)) > 50


def test_one_argument_of_many_is_seen(tmp_path: Path) -> None:
    """A long expression is cut at its commas, so that the difference is the part that changed."""
    words = [f"an_argument_{number}" for number in range(30)]
    files = {"engine/core.py": f"table = [{', '.join(words)}]\n"}
    old = write(tmp_path / "one", files)
    new = write(tmp_path / "two", {"engine/core.py": files["engine/core.py"].replace("argument_17", "argument_x")})
    _, _, text = run(tmp_path, new, "engine/core.py table\n", old)
    assert len(text.splitlines()) < 10
    assert "+    an_argument_x," in text
