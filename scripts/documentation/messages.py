#!/usr/bin/env python3
"""Print every text that users can meet, with the place it comes from, so that all of them can be read in one list.

Texts are the string literals of two words or more in kvcached/ and native/, without docstrings and comments. Each line
is ``FILE:LINE  KIND  TEXT``; what a text takes from variables is shown in braces. It reads the sources alone:

  scripts/documentation/messages.py              all of them
  scripts/documentation/messages.py --kind help  one kind; text are those that no other kind claims
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
KINDS = ("raised", "printed", "logged", "help", "doctor", "text")

_PRINTING = {"print", "say", "complain", "write", "error", "exit"}
_LOGGING = {"debug", "info", "warning", "exception", "critical", "warning_once", "log_fault"}
_HELPING = {"help", "description", "epilog", "usage"}
_C_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_TWO_WORDS = re.compile(r"[A-Za-z]{2,}[^A-Za-z]* [^A-Za-z]*[A-Za-z]{2,}")
_VARIABLE = re.compile(r"{[^{}]*}")


@dataclass(frozen=True)
class Message:
    """One text and where it is."""

    place: str
    kind: str
    text: str


class _Collector(ast.NodeVisitor):
    """Collects the texts of one Python file; ``_kind`` is what the surrounding statement or call makes of them."""

    def __init__(self, path: str) -> None:
        self.messages: list[Message] = []
        self._path = path
        self._kind = "doctor" if "/diagnosis/" in path else "text"

    def _within(self, kind: str, node: ast.AST) -> None:
        before, self._kind = self._kind, kind
        self.generic_visit(node)
        self._kind = before

    def visit_Expr(self, node: ast.Expr) -> None:
        """Skip docstrings, those of constants included."""
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Collect what is raised."""
        self._within("raised", node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Collect what is named a message, to be raised by the next statement, and the long texts of the help."""
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        kind = "raised" if "message" in names else "help" if names & {"EPILOG", "USAGE"} else self._kind
        self._within(kind, node)

    def visit_Call(self, node: ast.Call) -> None:
        """Collect what is printed or logged."""
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        kind = "logged" if name in _LOGGING else "printed" if name in _PRINTING else self._kind
        self._within(kind, node)

    def visit_keyword(self, node: ast.keyword) -> None:
        """Collect what the parser shows as help."""
        self._within("help" if node.arg in _HELPING else self._kind, node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Collect a text with variables; what they may be has texts of its own."""
        text = "".join(map(_shown, node.values))
        if re.search("[A-Za-z]{3}", _VARIABLE.sub("", text)):  # else it only joins others
            self._add(node, text)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Collect a text."""
        if isinstance(node.value, str):
            self._add(node, node.value)

    def _add(self, node: ast.expr, text: str) -> None:
        if _TWO_WORDS.search(text):
            self.messages.append(Message(f"{self._path}:{node.lineno}", self._kind, text))


def _shown(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return f"{{{ast.unparse(part.value)}}}"
    return str(part.value) if isinstance(part, ast.Constant) else ""


def python_messages(root: Path = ROOT) -> Iterator[Message]:
    """Yield the texts of the package."""
    for path in sorted((root / "kvcached").rglob("*.py")):
        if path.name != "_declarations.py":  # is generated
            collector = _Collector(str(path.relative_to(root)))
            collector.visit(ast.parse(path.read_text()))
            yield from collector.messages


def native_messages(root: Path = ROOT) -> Iterator[Message]:
    """Yield the texts of the native library."""
    for path in sorted((root / "native").glob("*.[ch]")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for text in _C_STRING.findall(line):
                if _TWO_WORDS.search(text):
                    yield Message(f"{path.relative_to(root)}:{number}", "text", text)


def main() -> int:
    """Print the list; the exit code."""
    parser = argparse.ArgumentParser(description="Print every text that users can meet.")
    parser.add_argument("--kind", choices=KINDS, help="only texts of this kind")
    kind = parser.parse_args().kind
    for message in (*python_messages(), *native_messages()):
        if kind in (None, message.kind):
            print(f"{message.place}  {message.kind}  {message.text.strip()}".replace("\n", "\n    "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
