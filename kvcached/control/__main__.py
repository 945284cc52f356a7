"""``python -m kvcached.control COMMAND``, the same as the console script ``kvcached-control``."""

from __future__ import annotations

import argparse
import os
import sys

from kvcached.control import exits, set, status  # noqa: A004 - the commands' own names
from kvcached.settings import SettingsError

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

COMMANDS = (set, status)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that says what to do."""

    def __init__(self, **options: object) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """End with the usage exit code."""
        self.exit(exits.USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="kvcached-control",
        description="Change how many idle prefix-cache tokens running LLM engines keep, and see what they keep.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except SettingsError as error:
        print(f"kvcached-control: {error}", file=sys.stderr)
        return exits.USAGE
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; what Python still holds must not raise again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.OK
    return code


if __name__ == "__main__":
    sys.exit(main())
