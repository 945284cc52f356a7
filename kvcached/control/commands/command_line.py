"""The command line: its parser, and what is the same for all commands when one ends, fails or is interrupted."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module

from kvcached import __version__
from kvcached.control import exit_codes
from kvcached.control.commands.standard_streams import standard_streams
from kvcached.control.rendering.text import DEFAULT_WIDTH, complain, width_of
from kvcached.errors import KvcachedError
from kvcached.settings import SettingsError

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import NoReturn

    from kvcached.control.commands.standard_streams import Stream

PROGRAM = "kvcached-control"

COMMANDS = ("set", "cap", "status", "watch", "metrics", "advise", "balance", "doctor", "fleet", "completion")
"""Each is the module of this name: ``add_parser`` declares it, and only the one that is called is imported."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help as it was written. Told its width, because the parser makes one for each option to check it."""

    def __init__(self, prog: str) -> None:
        # The library would import shutil, with all archive formats, to ask for the width.
        super().__init__(prog, width=(width_of(sys.stdout) or DEFAULT_WIDTH) - 2)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that says what to do."""

    def __init__(self, **options: object) -> None:
        options.setdefault("formatter_class", _Formatter)
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raise a usage error, which :func:`main` prints as that line."""
        raise _UsageError(self.prog, message)


class _UsageError(SystemExit):
    """The parser of ``prog`` does not accept the words of the command line."""

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(exit_codes.USAGE)
        self.prog = prog
        self.message = message


def build_parser(names: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of these commands."""
    parser = _Parser(
        prog=PROGRAM,
        description="Show and change how many tokens of KV running LLM engines keep, idle and in all.",
        epilog="example:\n  kvcached-control set 16k --instance my-model --wait",
    )
    parser.add_argument("-V", "--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for name in names:
        import_module(f"kvcached.control.commands.{name}").add_parser(commands)
        commands.choices[name].set_defaults(parser=commands.choices[name])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with standard_streams() as (output, errors):
        code = _run(words, output)
        output.flush()
        code = _conclude(code, output)
        if "--json" in words and code != exit_codes.OK and not output.said:
            reason = "".join(errors.said).strip().removeprefix(f"{PROGRAM}: ")
            print(json.dumps({"error": reason or f"failed with exit code {code}"}))
    return code


def _run(words: Sequence[str], output: Stream) -> int:
    """Run a command, and turn whatever ends it early into an exit code and a sentence."""
    try:
        arguments = _parse(words)
        output.acts = getattr(arguments, "acts", False)
        output.raises = getattr(arguments, "endless", False)
        return int(arguments.run(arguments))
    except SystemExit as end:  # how the parser ends, after a usage error or the help
        if isinstance(end, _UsageError):
            complain(f"{end.message}; {_what_to_write(words, end.prog)}", end.prog)
        return end.code if isinstance(end.code, int) else exit_codes.USAGE
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except KvcachedError as error:
        complain(str(error))
        return exit_codes.USAGE if isinstance(error, SettingsError) else exit_codes.UNAVAILABLE
    except OSError as error:
        if error is output.error:
            return exit_codes.OK
        complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return exit_codes.PROBLEM


def _parse(words: Sequence[str]) -> argparse.Namespace:
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if words == ["version"]:
        words = ["--version"]
    parser = build_parser(words[:1] if words and words[0] in COMMANDS else COMMANDS)
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        parser.error(f"unknown command {words[0]!r}; the commands are {', '.join(COMMANDS)}")
    arguments, unknown = parser.parse_known_args(words or ["--help"])
    if unknown:
        arguments.parser.error(f"unknown arguments: {' '.join(unknown)}")
    return arguments


def _what_to_write(words: Sequence[str], prog: str) -> str:
    """Return the right form of a command that was written as for another tool, or else where the help is."""
    import shlex  # noqa: PLC0415 - after an error only

    from kvcached.control.commands.habits import right_form  # noqa: PLC0415 - as above

    form = right_form(words)
    try:
        taken = form is not None and not build_parser().parse_known_args(form)[1]
    except _UsageError:
        taken = False
    return f"write: {PROGRAM} {shlex.join(form)}" if form and taken else f"see {prog} --help"


def _conclude(code: int, output: Stream) -> int:
    """Say that the output was lost, if it was; that changes the exit code only where the output was all there was."""
    if output.error is None or output.reader_left:
        return code
    complain(f"the output could not be written: {output.error.strerror}")
    return code if output.acts or code != exit_codes.OK else exit_codes.PROBLEM
