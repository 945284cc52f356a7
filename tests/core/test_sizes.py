"""How large the pieces of the package are: what a reader takes in at one look."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import kvcached

PACKAGE = Path(kvcached.__file__).parent
GENERATED = "_declarations.py"
MOST_GUARDS = 8
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


def caught_names(handled: ast.expr | None) -> set[str]:
    """Return the names in what an ``except`` catches; one without a type catches all."""
    return {"BaseException"} if handled is None else {n.id for n in ast.walk(handled) if isinstance(n, ast.Name)}


def handlers_of(name: str) -> dict[str, tuple[ast.ExceptHandler, str]]:
    """Return the handlers that catch ``name``, by their places, each with its line."""
    found = {}
    for path in sources():
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.ExceptHandler) and name in caught_names(node.type):
                found[f"{path.relative_to(PACKAGE)}:{node.lineno}"] = (node, lines[node.lineno - 1])
    return found


def test_exceptions_of_any_kind_are_caught_by_few_guards_each_with_a_reason() -> None:
    """At most eight handlers catch ``Exception``: the shared one, and those that no call more may slow down."""
    guards = handlers_of("Exception")
    assert [place for place, (_, line) in guards.items() if not re.search(r"BLE001.* - \w", line)] == []
    assert any(place.startswith("guards.py") for place in guards)
    assert len(guards) <= MOST_GUARDS, list(guards)
    print(f"{len(guards)} guards")


def test_what_ends_a_process_is_never_swallowed() -> None:
    """A handler of ``BaseException``, or of everything, raises it again, and nothing suppresses ``Exception``."""
    cleaning = handlers_of("BaseException")
    assert len(cleaning) > 0
    assert [place for place, (node, _) in cleaning.items() if ast.unparse(node.body[-1]) != "raise"] == []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                assert not {"Exception", "BaseException"} & {ast.unparse(kind) for kind in node.args}, path


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
