"""``kvcached-control completion``: a script that completes commands, options and instance names in bash and zsh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.control import exit_codes
from kvcached.control.commands.shared_options import add_ledger_dir
from kvcached.control.rendering.text import complain
from kvcached.ledger.snapshot import take_snapshot
from kvcached.settings import choose_ledger_dir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

EPILOG = """\
examples:
  source <(kvcached-control completion bash)
  kvcached-control completion zsh > ~/.zfunc/_kvcached-control
  kvcached-control completion names
"names" prints the names of the live instances; the scripts call it. Making a
script needs the package shtab (pip install shtab); using it does not."""

_INSTANCES = "_kvcached_control_instances"
_LIMITS = "_kvcached_control_limits"
_LEGAL = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"

# Neither script expands what it is given: a name is text from a file that others may write. Each looks at every line by
# itself, and completes only what an instance can be called.
PREAMBLE = {
    "bash": f"""\
{_INSTANCES}() {{
    local i name directory=() LC_ALL=C
    for ((i = 1; i < COMP_CWORD - 1; i++)); do
        [[ ${{COMP_WORDS[i]}} == --ledger-dir ]] && directory=(--ledger-dir "${{COMP_WORDS[i + 1]/#\\~\\//$HOME/}}")
    done
    while IFS= read -r name; do
        [[ $name =~ {_LEGAL} && $name == "$1"* ]] && printf '%s\\n' "$name"
    done < <("${{COMP_WORDS[0]/#\\~\\//$HOME/}}" completion names "${{directory[@]}}" 2>/dev/null)
}}
{_LIMITS}() {{
    compgen -W "none 25% 50% 4k 8k 16k 32k 64k 128k 1m unlimited" -- "$1"
}}
""",
    "zsh": f"""\
{_INSTANCES}() {{
    local -a directory names
    local name LC_ALL=C
    local at=${{words[(I)--ledger-dir]}}
    (( at )) && directory=(--ledger-dir "${{${{(Q)words[at + 1]}}/#\\~\\//$HOME/}}")
    while IFS= read -r name; do
        [[ $name =~ '{_LEGAL}' ]] && names+=("$name")
    done < <(kvcached-control completion names $directory 2>/dev/null)
    compadd -- $names
}}
{_LIMITS}() {{
    compadd -- none 25% 50% 4k 8k 16k 32k 64k 128k 1m unlimited
}}
""",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("completion", help="print a script for shell completion", epilog=EPILOG)
    parser.add_argument("what", metavar="SHELL", choices=("bash", "zsh", "names"), help="bash, zsh, or names")
    add_ledger_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print; the exit code."""
    if arguments.what == "names":
        return _print_names(choose_ledger_dir(arguments.ledger_dir))
    try:
        import shtab  # noqa: PLC0415 - an optional package
    except ImportError as error:
        complain(f"completion needs the package shtab ({error}); pip install shtab")
        return exit_codes.PROBLEM
    from kvcached.control.commands.command_line import build_parser  # noqa: PLC0415 - it imports this module

    parser = build_parser()
    for action in _actions(parser):
        _mark(action)
    print(shtab.complete(parser, shell=arguments.what, preamble=PREAMBLE[arguments.what]))
    return exit_codes.OK


def _print_names(path: str) -> int:
    snapshot = take_snapshot(path)
    if snapshot.fault is not None:
        complain(snapshot.reason)
        return exit_codes.UNAVAILABLE
    for name in snapshot.names:
        print(name)
    return exit_codes.OK


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and arguments of a parser and of its commands."""
    import argparse  # noqa: PLC0415 - loaded already

    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to look at a parser
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            for command in action.choices.values():
                yield from _actions(command)


def _mark(action: argparse.Action) -> None:
    """Tell shtab how the value of an option is completed."""
    if action.dest == "instance" and action.metavar == "NAME":
        action.complete = {"bash": _INSTANCES, "zsh": _INSTANCES}  # type: ignore[attr-defined]
    elif action.dest == "limit":
        action.complete = {"bash": _LIMITS, "zsh": _LIMITS}  # type: ignore[attr-defined]
    elif action.dest == "ledger_dir":
        action.complete = {"bash": "_shtab_compgen_dirs", "zsh": "_files -/"}  # type: ignore[attr-defined]
