"""How large the pieces of the package are: what a reader takes in at one look."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import kvcached

PACKAGE = Path(kvcached.__file__).parent
GENERATED = "_declarations.py"
OTHER_GUARDS = {
    "capacity.py",  # calls the engine's pool
    "memory/madvise.py",  # runs by value in an engine's worker
    "policy.py",  # calls the engine's eviction
    "advisor/observer.py",  # is called by engines
    "control/diagnosis/plugins.py",  # loads an engine's plugin
}
MOST_LINES_OF_A_FILE = 300
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_NINE_IN_TEN = 20


def sources() -> list[Path]:
    found = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != GENERATED]
    assert len(found) > 100
    return found


def functions(path: Path) -> dict[str, int]:
    """Return how many lines each function of a file has, without its docstring, which is for other readers."""
    tree = ast.parse(path.read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
            found[f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"] = lines
    return found


def test_every_broad_except_is_a_guard_with_a_reason() -> None:
    """Exceptions of any kind are caught only where code of an engine is called or called us, and a comment says why."""
    guards = {}
    for path in sources():
        name, lines = str(path.relative_to(PACKAGE)), path.read_text().splitlines()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == "Exception":
                raises = any(isinstance(below, ast.Raise) for below in ast.walk(node))
                guards[f"{name}:{node.lineno}"] = (
                    raises or re.search(r"BLE001.* - \w", lines[node.lineno - 1]) is not None
                )
    assert [place for place, has_reason in guards.items() if not has_reason] == []
    assert {place.split(":")[0] for place in guards if not place.startswith("engines/")} == OTHER_GUARDS
    print(f"{len(guards)} guards")


def test_no_file_is_long() -> None:
    """No module has more than 300 lines."""
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in sources()}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES_OF_A_FILE} == {}


def test_functions_are_short() -> None:
    """Nine functions in ten have at most 20 lines, and none has more than 60."""
    lengths = {name: lines for path in sources() for name, lines in functions(path).items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}
    ordered = sorted(lengths.values())
    print(f"{len(ordered)} functions, p90 {ordered[len(ordered) * 9 // 10]}, longest {ordered[-1]}")
    assert ordered[len(ordered) * 9 // 10] <= MOST_LINES_OF_NINE_IN_TEN
