"""Every command in the README and in docs/ is run here, or names the test that runs it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.commands import PATIENCE_S, Control, Toys, run

from kvcached.control.commands.command_line import build_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"```(sh|console|python)\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`(kvcached-control [a-z][^`]*)`")
OURS = re.compile(r"^(?:kvcached-control|(?:\S*/)?python -m kvcached\.control) ")

ELSEWHERE = {
    "scripts/demo": "scripts/demo",
    "scripts/test": "scripts/test",
    "scripts/bench": "scripts/bench",
    "scripts/serve-tiny-vllm": "tests/engines/vllm/test_serving.py",
    "curl": "tests/engines/vllm/test_serving.py",
    "vllm serve": "tests/engines/vllm/test_serving.py",
    "python -m sglang.launch_server": "tests/engines/sglang/test_limit.py",
    "python -m kvcached.rig": "tests/rig/test_rig_processes.py",
    "source .venv/bin/activate": "scripts/setup-venv",
    "pip install": "tests/build/test_packaging.py",
    "kvcached-agent": "tests/fleet/test_fleet_documented.py",
    "etcd ": "tests/fleet/test_fleet_documented.py",
    "export KVCACHED_FLEET": "tests/fleet/test_fleet_documented.py",
    "mkdir ": "tests/fleet/test_fleet_documented.py",
}
"""Commands that are run elsewhere, and where."""


def blocks(kind: str) -> Iterator[str]:
    """Yield the contents of all fenced blocks of a kind."""
    for page in PAGES:
        for found in FENCE.finditer(page.read_text()):
            if found[1] == kind:
                yield found[2]


def commands() -> list[str]:
    """Return the commands of all shell blocks, without comments and without what they print."""
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    lines += [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    bare = (re.sub(r"\s+#\s.*$", "", line).strip() for line in lines)
    return sorted({re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line) for line in bare if line and not line.startswith("#")})


def own_commands() -> list[str]:
    """Return the calls of the command line, without the program."""
    return sorted({OURS.sub("", command) for command in commands() if OURS.match(command)})


@pytest.fixture
def documented(ledger_dir: Path, toys: Toys) -> Control:
    """Return the command line where every instance that the pages name is running."""
    names = set(re.findall(r"--instance ([A-Za-z0-9.-]+)", "\n".join(own_commands())))
    toys.start(*sorted(names | {"my-model"}), capacity=200_000, token_bytes=1024, cap_floor=4_000)
    return Control(ledger_dir)


def test_own_commands_do_what_they_are_shown_to_do(documented: Control) -> None:
    """Each documented call of the command line succeeds where its instances run."""
    found = own_commands()
    assert len(found) >= 8
    for command in found:
        arguments = shlex.split(command)
        if arguments[0] in {"advise", "balance"} or {"--of-max", "--fleet"} & set(arguments):
            build_parser().parse_args(arguments)  # needs traffic or a fleet: their own tests see to that
        elif arguments[0] == "watch" or "--port" in arguments:
            assert _interrupted(documented, [re.sub("^9477$", "0", argument) for argument in arguments]) == 0, command
        else:
            result = documented.run(*arguments)
            # Other engines of this user may be in the doctor's way; everything else has to succeed.
            assert result.returncode == 0 or arguments[0] == "doctor", (command, result.stderr)
            assert result.stdout, command


def _interrupted(control: Control, arguments: list[str]) -> int:
    """Run a command that goes on until Ctrl-C, once it has shown something."""
    process = subprocess.Popen(control.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    return process.returncode


def test_commands_in_sentences_are_ours() -> None:
    """Each call within a sentence or a table is one that the parser takes."""
    found = {command for page in PAGES for command in INLINE.findall(page.read_text())}
    assert found
    for command in found:
        arguments = shlex.split(command)[1:]
        if arguments[1:] or arguments[0] not in ("set", "cap", "advise", "balance"):
            build_parser().parse_args(arguments)


def test_python_examples_run(documented: Control) -> None:
    """The Python examples of a page run one after the other, and the README's prints what it promises."""
    printed = {}
    for page in PAGES:
        example = "\n".join(found[2] for found in FENCE.finditer(page.read_text()) if found[1] == "python")
        result = run([sys.executable, "-c", example], KVCACHED_LEDGER_DIR=str(documented.directory))
        assert result.returncode == 0, result.stderr
        printed[str(page.relative_to(ROOT))] = result.stdout
    assert printed["README.md"].startswith("accepted ")
    assert "idle tokens" in printed["docs/python.md"]


def test_printed_results_look_as_documented(documented: Control) -> None:
    """The result that the README shows is of the form that the command prints."""
    shown = re.search(r"^applied r1: .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert shown is not None
    printed = documented.run("set", "16k", "--instance", "my-model", "--wait").stdout.strip()
    forms = [re.sub(r"in \S+ after [\d.]+ s", "in DIR after S s", text) for text in (shown[0], printed)]
    assert forms[0] == forms[1]


def test_shared_directory_as_documented(tmp_path: Path) -> None:
    """The directory that a group shares gets its mode, and ledgers in it may be written by the group, any umask."""
    (command,) = [command for command in commands() if command.startswith("install ")]
    directory = tmp_path / "shared"
    environment = {"ENGINE_USER": str(os.getuid()), "OPERATORS": str(os.getgid())}
    run(["sh", "-c", command.replace("/run/kvcached", str(directory))], **environment)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o2770
    toys = Toys(directory)
    before = os.umask(0o077)
    try:
        toys.start("my-model")
    finally:
        os.umask(before)
        toys.stop()
    assert stat.S_IMODE((directory / "cpu-0.ledger").stat().st_mode) == 0o660


def test_completion_is_loaded_as_documented(tmp_path: Path) -> None:
    """The line for bash defines a completion for the program."""
    (command,) = [command for command in commands() if command.startswith("source <")]
    program = tmp_path / "kvcached-control"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvcached.control "$@"\n')
    program.chmod(0o755)
    script = f"{command}; complete -p kvcached-control"
    result = run(["bash", "-c", script], PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.stdout.endswith("kvcached-control\n"), result.stderr


@pytest.mark.needs_program("promtool", "prometheus")
def test_promtool_as_documented() -> None:
    """The check of the rules succeeds."""
    (command,) = [command for command in commands() if command.startswith("promtool ")]
    assert subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_no_command_is_left_out() -> None:
    """Every documented command is run in this file or in a place that exists."""
    here = ("install ", "source <", "promtool ")
    for command in commands():
        places = [place for start, place in ELSEWHERE.items() if command.startswith(start)]
        if not OURS.match(command) and not command.startswith(here):
            assert places, command
            assert (ROOT / places[0]).exists(), places[0]


def test_links_and_pictures_exist() -> None:
    """Every relative link of a page leads to a file."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
