"""The structure that a reader sees from the file list, held by tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcached

PACKAGE = Path(kvcached.__file__).parent
ALLOWED = {
    "errors": set(),
    "values": set(),
    "results": set(),
    "limits": {"values"},
    "arguments": {"values"},
    "settings": {"errors", "limits", "values"},
    "policy": {"values"},
    "_native": {"errors", "values", "_declarations"},
    "ownership": set(),
    "ledger": {"_native", "errors", "ownership", "settings"},
    "registration": {"_native", "ledger", "settings", "values"},
    "resumption": {"values"},
    "subscription": {"registration", "resumption", "values"},
    "replicas": {"_native", "ledger", "settings"},
    "snapshot": {"ledger", "replicas"},
    "instances": {"ledger", "replicas", "settings", "snapshot", "values"},
    "elsewhere": {"ledger", "settings", "snapshot"},
    "advisor/sampling": set(),
    "advisor/curve": set(),
    "advisor/idle_stack": set(),
    "advisor/windows": {"advisor.curve"},
    "advisor/estimator": {"advisor.idle_stack", "advisor.sampling", "advisor.windows"},
    "advisor/page": set(),
    "advisor/page_file": {"advisor.page", "ledger", "registration"},
    "advisor/observer": {"advisor.estimator", "advisor.page", "advisor.page_file", "ledger", "registration"},
    "addressees": {"elsewhere", "ledger", "replicas", "results", "snapshot", "values"},
    "program": set(),
    "publication": {"_native", "addressees", "ledger", "program", "replicas", "results", "values"},
}


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_declarations.py"]


def imported(path: Path) -> set[str]:
    """Return the package's own modules that a file imports, as dotted names below the package."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvcached":
            below = node.module.split(".")[1:]
            names |= {".".join([*below, alias.name]) if not below else ".".join(below) for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("kvcached.")}
    return names


@pytest.mark.parametrize("module", ALLOWED)
def test_core_imports_run_one_way(module: str) -> None:
    """Each core module imports only the layers below it."""
    assert imported(PACKAGE / f"{module}.py") <= ALLOWED[module]


def test_nothing_imports_engines_or_rig() -> None:
    """No module outside engines and rig imports them, and the engines' plugins do not know each other."""
    for path in modules():
        own = path.relative_to(PACKAGE).parts
        for name in imported(path):
            top = name.split(".")[0]
            if top in {"engines", "rig"}:
                assert own[0] == top, f"{path} imports {name}"
            if name.startswith("engines.") and own[0] == "engines" and len(own) > 2:
                assert name.split(".")[1] == own[1], f"{path} imports {name}"


def test_engine_side_does_not_know_the_control_side() -> None:
    """What runs inside an engine imports nothing of publication, instances or the command line."""
    control_side = {"addressees", "arguments", "control", "instances", "publication", "results"}
    for path in modules():
        if path.relative_to(PACKAGE).parts[0] in {"engines", "rig"}:
            assert not {name.split(".")[0] for name in imported(path)} & control_side, path


def test_only_the_binding_knows_cffi() -> None:
    """No module but the binding touches the generated declarations or cffi itself."""
    for path in modules():
        if path.name != "_native.py":
            assert not imported(path) & {"_declarations"}, path
            assert not re.search(r"^\s*(from|import) (cffi|_cffi_backend)", path.read_text(), re.MULTILINE), path


def test_no_class_inside_a_function() -> None:
    """Classes stand at module level, where they can be found, pickled and tested."""
    for path in modules():
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert not any(isinstance(node, ast.ClassDef) for node in ast.walk(function)), path


@pytest.mark.parametrize(
    "module",
    ["kvcached", "kvcached.control", "kvcached.control.api", "kvcached.control.program", "kvcached.subscription"],
)
def test_light_imports(module: str) -> None:
    """Importing the door loads neither torch nor an engine, no C parser and no table library."""
    heavy = {"torch", "vllm", "sglang", "cffi", "pycparser", "rich", "numpy", "prometheus_client"}
    code = f"import {module}, sys; print(*{heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


@pytest.mark.parametrize("module", ["kvcached.control.__main__", "kvcached.control.program"])
def test_command_line_starts_without_slow_modules(module: str) -> None:
    """The command line imports no module that costs its start milliseconds without being needed."""
    slow = {
        "typing",
        "pathlib",
        "logging",
        "asyncio",
        "socket",
        "subprocess",
        "tempfile",
        "unittest",
        "importlib.metadata",
    }
    code = f"import {module}, sys; print(*{slow} & set(sys.modules))"
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
