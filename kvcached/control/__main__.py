"""``python -m kvcached.control COMMAND``, the same as the console script ``kvcached-control``."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from kvcached._native import NativeLibraryError
from kvcached.control import exits
from kvcached.control.text import DEFAULT_WIDTH, harden, width_of
from kvcached.settings import SettingsError

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import NoReturn

COMMANDS = ("set", "status", "watch", "metrics", "advise", "doctor", "completion")
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
        """End with the usage exit code."""
        self.exit(exits.USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser(names: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of these commands."""
    parser = _Parser(
        prog="kvcached-control",
        description="Change how many idle prefix-cache tokens running LLM engines keep, and see what they keep.",
        epilog="example:\n  kvcached-control set 16k --instance my-model --wait",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for name in names:
        import_module(f"kvcached.control.{name}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        harden(stream)
    parser = build_parser(argv[:1] if argv and argv[0] in COMMANDS else COMMANDS)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except SettingsError as error:
        return _fail(str(error), exits.USAGE)
    except NativeLibraryError as error:
        return _fail(f"{error}; see kvcached-control doctor", exits.UNAVAILABLE)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; what Python still holds must not raise again when it exits.
        _silence_output()
        return exits.OK
    except OSError as error:
        _silence_output()
        return _fail(str(error), exits.PROBLEM)
    return code


def _fail(message: str, code: int) -> int:
    print(f"kvcached-control: {message}", file=sys.stderr)
    return code


def _silence_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
