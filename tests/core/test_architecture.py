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
TESTS = Path(__file__).parents[1]
SCRIPTS = TESTS.parent / "scripts"
ALLOWED = {
    "light_dataclasses": set(),
    "errors": set(),
    "guards": set(),
    "values": set(),
    "ledger/results": {"values"},
    "limits": {"values"},
    "arguments": {"values"},
    "settings": {"errors", "limits", "values"},
    "bound_policy": {"values"},
    "policy": {"bound_policy", "guards", "values"},
    "capacity": {"bound_policy", "guards", "policy", "values"},
    "replica_policy": {"capacity", "memory.elastic", "memory.pool_memory", "policy", "values"},
    "memory/regions": set(),
    "memory/madvise": {"guards"},
    "memory/figures": set(),
    "memory/kernel_figures": {"memory.regions"},
    "memory/returning": {"memory.regions", "memory.madvise"},
    "memory/pool_memory": {"memory.figures", "memory.regions", "memory.returning"},
    "memory/elastic": {"memory.pool_memory"},
    "ledger/contents": {"values"},
    "ledger/codes": {"ledger.contents"},
    "printable_text": set(),
    "ledger/structs": {"ledger.contents", "printable_text", "values"},
    "ledger/binding": {"errors", "values", "ledger._declarations", "ledger.codes", "ledger.contents", "ledger.structs"},
    "ledger/ownership": set(),
    "ledger/open_ledger": {"ledger.binding", "ledger.codes", "ledger.contents"},
    "ledger/self_test": {"ledger.binding", "values"},
    "ledger/directory": {
        "ledger.binding",
        "ledger.codes",
        "ledger.contents",
        "ledger.open_ledger",
        "errors",
        "ledger.ownership",
        "settings",
    },
    "ledger/registration": {
        "ledger.binding",
        "ledger.codes",
        "ledger.contents",
        "ledger.directory",
        "ledger.open_ledger",
        "settings",
        "values",
    },
    "ledger/resumption": {"values"},
    "ledger/bound_settlement": {"ledger.resumption", "values"},
    "ledger/settlement": {"ledger.registration", "ledger.bound_settlement", "values"},
    "ledger/watcher": {"ledger.registration", "ledger.settlement", "values"},
    "ledger/subscription": {"ledger.registration", "ledger.settlement", "ledger.watcher", "values"},
    "ledger/replicas": {"ledger.contents", "ledger.directory", "ledger.open_ledger", "settings", "values"},
    "ledger/snapshot": {"ledger.directory", "ledger.open_ledger", "ledger.replicas"},
    "ledger/doorbells": {"ledger", "ledger.open_ledger"},
    "ledger/instances": {
        "ledger.contents",
        "ledger.directory",
        "ledger.replicas",
        "settings",
        "ledger.snapshot",
        "values",
    },
    "ledger/not_found": {"ledger.directory", "settings", "ledger.snapshot"},
    "advisor/sampling": set(),
    "advisor/curve": set(),
    "advisor/idle_stack": set(),
    "advisor/windows": {"advisor.curve"},
    "advisor/estimator": {"advisor.idle_stack", "advisor.sampling", "advisor.windows"},
    "advisor/page": set(),
    "advisor/page_file": {"advisor.page", "ledger.directory", "ledger.registration"},
    "advisor/reading": {"advisor.curve", "advisor.page"},
    "advisor/observer": {
        "advisor.estimator",
        "advisor.page",
        "advisor.page_file",
        "guards",
        "ledger.directory",
        "ledger.registration",
    },
    "ledger/addressees": {
        "ledger.not_found",
        "ledger.directory",
        "ledger.replicas",
        "ledger.results",
        "ledger.snapshot",
        "values",
    },
    "program_name": set(),
    "instance_patterns": {"settings"},
    "ledger/publication": {
        "ledger.binding",
        "ledger.contents",
        "ledger.addressees",
        "ledger.directory",
        "program_name",
        "ledger.replicas",
        "ledger.results",
        "values",
    },
    "balance/rules": set(),
    "balance/division": set(),
    "balance/traffic": {"balance.rules"},
    "balance/engine_look": {"advisor.page", "values"},
    "balance/budget": {"balance.engine_look", "values"},
    "balance/worth": {"advisor.page", "advisor.reading", "balance.engine_look", "printable_text"},
    "balance/standing": {"balance.worth", "values"},
    "balance/proposal": {"balance.division", "balance.rules", "balance.standing"},
    "balance/decision": {"balance.proposal", "balance.rules", "balance.standing", "values"},
    "balance/looking": {
        "advisor.page",
        "advisor.page_file",
        "balance.engine_look",
        "ledger.directory",
        "ledger.registration",
        "ledger.replicas",
        "ledger.snapshot",
        "values",
    },
    "balance/terms": {"balance.budget", "balance.rules"},
    "balance/observations": {
        "balance.engine_look",
        "balance.rules",
        "balance.standing",
        "balance.terms",
        "balance.traffic",
        "balance.worth",
        "instance_patterns",
        "ledger.waiting",
        "values",
    },
    "balance/publishing_round": {
        "arguments",
        "balance.decision",
        "balance.engine_look",
        "balance.observations",
        "balance.rules",
        "balance.standing",
        "balance.terms",
        "ledger.publication",
        "ledger.results",
        "ledger.waiting",
    },
    "balance/budget_lock": {"errors", "ledger.directory", "printable_text"},
    "balance/budget_state": {"balance.budget_lock", "ledger.directory"},
    "balance/decision_json": {
        "balance.decision",
        "balance.publishing_round",
        "balance.standing",
        "balance.terms",
    },
    "ledger/waiting": {
        "ledger",
        "ledger.open_ledger",
        "ledger.publication",
        "ledger.replicas",
        "ledger.results",
        "ledger.snapshot",
        "values",
    },
}


ROOMS = {
    "api": {"queries"},
    "exit_codes": set(),
    "ending_signals": set(),
    "queries": {"queries", "rendering.text"},
    "rendering": {"rendering", "queries", "exit_codes", "ending_signals"},
    "diagnosis": {"diagnosis", "rendering", "queries"},
    "commands": {"commands", "diagnosis", "rendering", "queries", "api", "exit_codes", "ending_signals"},
    "__init__": {"api", "queries"},
    "__main__": {"commands", "exit_codes"},
}
"""What each room of the control package may import of the others."""


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_declarations.py"]


def imported_module(below: list[str], name: str) -> str:
    """Return the module that ``from kvcached.BELOW import NAME`` loads: NAME itself where it is a module."""
    place = PACKAGE.joinpath(*below, name)
    is_module = not below or place.is_dir() or place.with_suffix(".py").exists()
    return ".".join([*below, name] if is_module else below)


def imported(path: Path) -> set[str]:
    """Return the package's own modules that a file imports, as dotted names below the package."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvcached":
            below = node.module.split(".")[1:]
            names |= {imported_module(below, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("kvcached.")}
    return names


@pytest.mark.parametrize("module", ALLOWED)
def test_core_imports_run_one_way(module: str) -> None:
    """Each core module imports only the layers below it."""
    assert imported(PACKAGE / f"{module}.py") <= ALLOWED[module] | {"light_dataclasses"}


def test_rooms_of_the_control_side_import_one_way() -> None:
    """Commands know how things are shown, that knows what was found out, and nothing knows the commands."""
    for path in modules():
        own = path.relative_to(PACKAGE).with_suffix("").parts
        if own[0] == "control":
            for name in imported(path):
                if name.startswith("control."):
                    below = name.split(".")[1:]
                    assert {below[0], ".".join(below)} & ROOMS[own[1]], f"{path} imports {name}"


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
    control_side = {"arguments", "balance", "control", "fleet"} | {
        f"ledger.{name}" for name in ("addressees", "instances", "publication", "results", "waiting")
    }
    for path in modules():
        if path.relative_to(PACKAGE).parts[0] in {"engines", "rig"}:
            below = [name.split(".") for name in imported(path)]
            assert not {".".join(name[:depth]) for name in below for depth in (1, 2)} & control_side, path


def test_the_fleet_is_between_the_ledgers_and_the_command_line() -> None:
    """The fleet imports nothing of the control side or the engines, and only its etcd package knows grpc."""
    for path in modules():
        own = path.relative_to(PACKAGE).parts
        names = imported(path)
        if own[0] == "fleet":
            assert not {name.split(".")[0] for name in names} & {"control", "engines", "rig", "policy"}, path
        if own[0] not in {"fleet", "control"}:
            assert "fleet" not in {name.split(".")[0] for name in names}, path
        if own[:2] != ("fleet", "etcd"):
            assert not re.search(r"^\s*(from|import) (grpc|google)", path.read_text(), re.MULTILINE), path


def test_balancing_does_not_know_the_command_line() -> None:
    """What divides a budget imports nothing of the control package: a command is one way to run it."""
    for path in modules():
        if path.relative_to(PACKAGE).parts[0] in {"balance", "ledger", "advisor"}:
            assert not any(name.split(".")[0] == "control" for name in imported(path)), path


def test_only_the_binding_knows_cffi() -> None:
    """No module but the binding touches the generated declarations or cffi itself."""
    for path in modules():
        if path != PACKAGE / "ledger" / "binding.py":
            assert not imported(path) & {"ledger._declarations"}, path
            assert not re.search(r"^\s*(from|import) (cffi|_cffi_backend)", path.read_text(), re.MULTILINE), path


def test_only_the_ledger_package_knows_the_binding() -> None:
    """Nothing outside the ledger package imports the binding, or reaches for the handle of an open ledger."""
    for path in modules():
        if path.parent != PACKAGE / "ledger":
            assert "ledger.binding" not in imported(path), path
            attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
            assert [node.lineno for node in attributes if node.attr == "handle"] == [], path


def test_a_name_is_given_once() -> None:
    """No two modules and no two public classes have one name, also where the plugins have the same parts."""
    found: dict[str, list[str]] = {}
    for path in modules():
        if path.name not in {"__init__.py", "__main__.py"}:
            found.setdefault(path.name, []).append(str(path))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(f"{path}: class {node.name}")
    assert [places for places in found.values() if len(places) > 1] == []


def files_of_scripts() -> list[Path]:
    """Return the programs below scripts/."""
    files = [path for path in SCRIPTS.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [path for path in files if path.suffix in {"", ".py", ".c"}]


def test_tests_import_nothing_from_scripts() -> None:
    """No test and no helper of the tests imports a module that is below scripts/."""
    names = {"scripts"} | {path.stem for path in files_of_scripts() if path.suffix == ".py"}
    assert len(names) > 5
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                found = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Import):
                found = {alias.name.partition(".")[0] for alias in node.names}
            else:
                continue
            assert not found & names, path


def test_no_two_scripts_share_a_name() -> None:
    """Each file below scripts/ has a name of its own, suffix and hyphens aside."""
    found: dict[str, list[Path]] = {}
    for path in files_of_scripts():
        found.setdefault(path.stem.replace("-", "_"), []).append(path)
    assert [paths for paths in found.values() if len(paths) > 1] == []


def test_the_list_of_scripts_names_every_file() -> None:
    """scripts/README.md names each file below the folder, and what is directly in the folder can be run."""
    listed = set(re.findall(r"`([\w./-]+)`", (SCRIPTS / "README.md").read_text()))
    assert {path.name for path in files_of_scripts()} <= listed
    assert all(path.stat().st_mode & 0o111 for path in SCRIPTS.iterdir() if path.is_file() and path.suffix == "")


def test_no_class_inside_a_function() -> None:
    """Classes are at module level, where they can be found, pickled and tested."""
    for path in modules():
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert not any(isinstance(node, ast.ClassDef) for node in ast.walk(function)), path


@pytest.mark.parametrize(
    "module",
    [
        "kvcached",
        "kvcached.control",
        "kvcached.control.api",
        "kvcached.control.commands.command_line",
        "kvcached.ledger.subscription",
    ],
)
def test_light_imports(module: str) -> None:
    """Importing the entry points loads neither torch nor an engine, no C parser and no table library."""
    heavy = {"torch", "vllm", "sglang", "cffi", "pycparser", "rich", "numpy", "prometheus_client"}
    code = f"import {module}, sys; print(*{heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
