"""``kvcached-control doctor``: find out why an engine is not controlled."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvcached.control import exit_codes
from kvcached.control.commands.shared_options import add_json, add_ledger_dir, process_id
from kvcached.printable_text import printable
from kvcached.settings import choose_ledger_dir

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvcached.control.diagnosis.finding import Finding

EPILOG = """\
examples:
  kvcached-control doctor
  kvcached-control doctor --pid 4711
exit codes:
  0 no problems   1 problems were found   2 wrong usage"""

_LEVEL_WIDTH = len("problem")
_SUBJECT_WIDTH = 16


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("doctor", help="find out why an engine is not controlled", epilog=EPILOG)
    add_ledger_dir(parser)
    parser.add_argument("--pid", metavar="P", type=process_id, help="check only the engine with this process id")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print each finding as it is made; the exit code."""
    path = choose_ledger_dir(arguments.ledger_dir)
    findings = []
    for finding in _examine(path, arguments):
        findings.append(finding)
        if not arguments.json:
            _print(finding)
    problems = sum(finding.level == "problem" for finding in findings)
    if arguments.json:
        checks = [finding.to_dict() for finding in findings]
        print(json.dumps({"ledger_dir": path, "ok": problems == 0, "checks": checks}))
    else:
        print(f"{problems} problem(s)" if problems else "no problems")
    return exit_codes.PROBLEM if problems else exit_codes.OK


def _examine(path: str, arguments: argparse.Namespace) -> Iterator[Finding]:
    # The parser needs none of them.
    from kvcached.control.diagnosis.finding import PROBLEM  # noqa: PLC0415
    from kvcached.control.diagnosis.ledger_directory import check_directory  # noqa: PLC0415
    from kvcached.control.diagnosis.ledgers import check_ledgers  # noqa: PLC0415
    from kvcached.control.diagnosis.native_library import KERNEL, check_library  # noqa: PLC0415
    from kvcached.control.diagnosis.plugins import check_plugins  # noqa: PLC0415
    from kvcached.control.diagnosis.running_engines import check_engines  # noqa: PLC0415

    usable = True
    for finding in check_library():
        usable = usable and (finding.level != PROBLEM or finding.subject == KERNEL)  # files can be read all the same
        yield finding
    yield from check_directory(path, named=arguments.ledger_dir is not None)
    if usable:
        yield from check_ledgers(path)
    yield from check_plugins()
    yield from check_engines(path, arguments.pid)


def _print(finding: Finding) -> None:
    from kvcached.control.rendering import text  # noqa: PLC0415 - for people's output only

    colour = text.wants_colour(sys.stdout)
    style = {"ok": text.GOOD, "note": text.FAINT}.get(finding.level, text.BAD)
    level = text.styled(finding.level.ljust(_LEVEL_WIDTH), style, colour=colour)
    subject = text.styled(printable(finding.subject).ljust(_SUBJECT_WIDTH), text.STRONG, colour=colour)
    said = printable(f"{finding.text}; {finding.remedy}" if finding.remedy else finding.text)
    width = text.width_of(sys.stdout)
    indent = _LEVEL_WIDTH + _SUBJECT_WIDTH + 4
    print(f"{level}  {subject}  {_fold(said, width, indent)}", flush=True)


def _fold(said: str, width: int | None, indent: int) -> str:
    """Break a text over lines on a terminal; elsewhere a finding stays one line, for grep."""
    if width is None or len(said) + indent <= width:
        return said
    import textwrap  # noqa: PLC0415 - for long findings only

    lines = textwrap.wrap(said, max(width - indent, 30), break_on_hyphens=False, break_long_words=False)
    return ("\n" + " " * indent).join(lines)
