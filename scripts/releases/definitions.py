"""What a name is defined as in a tree of Python sources, read from the syntax alone."""

from __future__ import annotations

import ast
import functools
import re
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Definition:
    """One definition. Comments, docstrings and layout are no part of it."""

    signature: str
    """What users of the name see: parameters, bases and fields, or the kind of name."""
    body: str
    """What it does or is; of a class nothing, since its members have names of their own."""


class Sources:
    """The Python files of one release: a folder, or a wheel that stays packed."""

    def __init__(self, place: Path) -> None:
        """Read from ``place``. Raises ``OSError`` or ``zipfile.BadZipFile`` if it is neither folder nor wheel."""
        self._wheel = None if place.is_dir() else zipfile.ZipFile(place)
        self._folder = place

    @functools.cached_property
    def files(self) -> frozenset[str]:
        """The paths of all Python files, relative and with slashes."""
        if self._wheel is not None:
            return frozenset(name for name in self._wheel.namelist() if name.endswith(".py"))
        return frozenset(path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*.py"))

    @functools.lru_cache  # noqa: B019 - two of these live as long as the program
    def text(self, file: str) -> str:
        """Return the text of a file; empty if there is none."""
        if file not in self.files:
            return ""
        data = self._wheel.read(file) if self._wheel is not None else (self._folder / file).read_bytes()
        return data.decode(errors="replace")

    @functools.lru_cache  # noqa: B019
    def tree(self, file: str) -> ast.Module:
        """Return the syntax of a file; empty if there is none. Raises ``SyntaxError``."""
        return ast.parse(self.text(file), file)

    def find(self, file: str, name: str) -> Definition | None:
        """Return the definition of the dotted ``name`` in ``file``, or None."""
        found = list(_definitions(self.tree(file).body, name.split(".")))
        return _define(found) if found else None

    def search(self, name: str, package: str) -> list[str]:
        """Return the files below ``package`` that define the dotted ``name``."""
        first = re.compile(rf"^\s*(class|def|async def)\s+{re.escape(name.split('.')[0])}\b|^{name}\b", re.MULTILINE)
        files = sorted(file for file in self.files if file.startswith(package + "/"))
        return [file for file in files if first.search(self.text(file)) and self.find(file, name) is not None]


def _definitions(body: Iterable[ast.stmt], path: list[str]) -> Iterator[ast.stmt]:
    """Yield the statements that define ``path``, also below ``if`` and ``try``."""
    for statement in body:
        if isinstance(statement, (*_Function, ast.ClassDef)):
            if statement.name == path[0]:
                yield from [statement] if len(path) == 1 else _members(statement, path[1:])
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            if len(path) == 1 and path[0] in _assigned(statement):
                yield statement
        else:
            for part in ("body", "orelse", "handlers", "finalbody"):
                inner = getattr(statement, part, [])
                yield from _definitions([each for each in inner if isinstance(each, ast.stmt)], path)
                for handler in (each for each in inner if isinstance(each, ast.ExceptHandler)):
                    yield from _definitions(handler.body, path)


def _members(owner: ast.stmt, path: list[str]) -> Iterator[ast.stmt]:
    """Yield what defines ``path`` in a class or function; attributes that methods assign to ``self`` included."""
    body = getattr(owner, "body", [])
    found = list(_definitions(body, path))
    if found or len(path) > 1 or not isinstance(owner, ast.ClassDef):
        yield from found
        return
    for method in (each for each in body if isinstance(each, _Function)):
        for statement in ast.walk(method):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and f"self.{path[0]}" in _assigned(statement):
                yield statement


def _assigned(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    flat = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [ast.unparse(each) for each in flat]


def _define(statements: list[ast.stmt]) -> Definition:
    """Return one definition of all statements that define a name, in their order."""
    signatures = dict.fromkeys(_signature(statement) for statement in statements)
    return Definition("\n".join(signatures), "\n".join(_body(statement) for statement in statements))


def _signature(statement: ast.stmt) -> str:
    if isinstance(statement, ast.ClassDef):
        fields = [ast.unparse(each) for each in statement.body if isinstance(each, ast.AnnAssign)]
        bases = ", ".join(ast.unparse(each) for each in (*statement.bases, *statement.keywords))
        return "\n    ".join([f"{_decorators(statement)}class {statement.name}({bases})", *fields])
    if isinstance(statement, _Function):
        returns = f" -> {ast.unparse(statement.returns)}" if statement.returns is not None else ""
        kind = "async def" if isinstance(statement, ast.AsyncFunctionDef) else "def"
        return f"{_decorators(statement)}{kind} {statement.name}({ast.unparse(statement.args)}){returns}"
    return "attribute"


def _decorators(statement: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return "".join(f"@{ast.unparse(each)} " for each in statement.decorator_list)


def _body(statement: ast.stmt) -> str:
    if isinstance(statement, ast.ClassDef):
        return ""
    if isinstance(statement, _Function):
        return "\n".join(ast.unparse(each) for each in statement.body if not _is_text(each))
    return ast.unparse(statement)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
