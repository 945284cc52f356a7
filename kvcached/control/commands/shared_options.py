"""Options that several commands share."""

from __future__ import annotations

import argparse

from kvcached.arguments import MAX_WAIT_S, check_incarnation, check_note
from kvcached.limits import parse_amount
from kvcached.settings import check_instance_name
from kvcached.values import MAX_REVISION

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from kvcached.limits import Amount

    Parsed = TypeVar("Parsed")

LEAST_INTERVAL_S = 0.1
"""How short an interval may be."""

MAX_PORT = 65535

WHOLE_PERCENT = 100
MOST_BLOCK_TOKENS = 65536
"""Larger blocks than any cache has."""

MAX_PID = 2**22
"""The largest process id that Linux gives out."""


def checked(check: Callable[[str], Parsed], text: str) -> Parsed:
    """Return what ``check`` makes of ``text``; its ValueError is a usage error."""
    try:
        return check(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_ledger_dir(parser: argparse.ArgumentParser) -> None:
    """Declare ``--ledger-dir``."""
    parser.add_argument(
        "--ledger-dir",
        metavar="DIR",
        help="the ledger directory (default: KVCACHED_LEDGER_DIR, else /dev/shm/kvcached-<uid>)",
    )


def add_fleet(parser: argparse._ActionsContainer) -> None:
    """Declare ``--fleet``."""
    parser.add_argument(
        "--fleet", metavar="URL", nargs="?", const="", help="etcds://HOST:PORT,.../NAME (default: KVCACHED_FLEET)"
    )


def add_wave_options(parser: argparse._ActionsContainer) -> None:
    """Declare what a roll-out does between its waves."""
    parser.add_argument("--max-failed", metavar="N", type=revision, help="targets that may refuse (default 0)")
    parser.add_argument("--soak", metavar="SECONDS", type=seconds, default=0.0, help="how long to wait after each wave")
    parser.add_argument("--check", metavar="COMMAND", help="pause the roll-out if this fails after a wave")


def label(text: str) -> tuple[str, str]:
    """Parse a label."""
    name, equals, value = text.partition("=")
    if not (name and equals and text.isprintable()):
        message = f"{text!r} is not a label; write NAME=VALUE"
        raise argparse.ArgumentTypeError(message)
    return name, value


def waves(text: str) -> list[float]:
    """Parse the waves of a roll-out: growing percentages, the last one 100."""
    found = [_number(part.removesuffix("%")) for part in text.split(",")]
    if found != sorted(set(found)) or not found[0] > 0 or found[-1] != WHOLE_PERCENT:
        message = f"{text!r} are not waves; give growing percentages that end in 100, such as 1,10,50,100"
        raise argparse.ArgumentTypeError(message)
    return found


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def add_block_tokens(parser: argparse.ArgumentParser) -> None:
    """Declare ``--block-tokens``, of recorded traffic."""
    parser.add_argument(
        "--block-tokens", metavar="N", type=block_tokens, help="tokens per hash id of the trace (default 512)"
    )


def block_tokens(text: str) -> int:
    """Parse the size of a block."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:8]) <= MOST_BLOCK_TOKENS):
        message = f"{text!r} is not a number of tokens per block, such as 512 or 16"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def instance_name(text: str) -> str:
    """Parse an instance name."""
    return checked(check_instance_name, text)


def limit(text: str) -> int | Amount:
    """Parse a limit."""
    return checked(parse_amount, text)


def incarnation(text: str) -> str:
    """Parse an incarnation."""
    return checked(check_incarnation, text)


def note(text: str) -> str:
    """Parse a note: what a ledger's record holds whole, and what a terminal may show."""
    return checked(check_note, text)


def revision(text: str) -> int:
    """Parse a revision: digits only."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_REVISION))):
        message = f"{text!r} is not a revision; give the number that status shows after r"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _number(text: str) -> float:
    """Return what plain digits say, and -1 for what only Python's own parser would take."""
    try:
        return float(text) if text.isascii() and "_" not in text and text == text.strip() else -1.0
    except ValueError:
        return -1.0


def seconds(text: str) -> float:
    """Parse a number of seconds that a clock can wait for."""
    value = _number(text)
    if not 0 <= value <= MAX_WAIT_S:
        message = f"{text!r} is not a number of seconds, such as 10 or 0.5"
        raise argparse.ArgumentTypeError(message)
    return value


def seconds_or_limit(text: str) -> float | Misplaced:
    """Parse what follows ``--wait``: seconds, or a LIMIT that was written after it."""
    try:
        return seconds(text)
    except argparse.ArgumentTypeError:
        try:
            return Misplaced(parse_amount(text))
        except ValueError:
            pass
        raise


class Misplaced:
    """A limit that was written where seconds could be."""

    def __init__(self, limit: int | Amount) -> None:
        self.limit = limit


def share(text: str) -> float:
    """Parse a share or a rate: above 0, up to 1."""
    value = _number(text)
    if not 0 < value <= 1:
        message = f"{text!r} is not a share; give a number above 0 and up to 1, such as 0.9"
        raise argparse.ArgumentTypeError(message)
    return value


def process_id(text: str) -> int:
    """Parse a process id."""
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text[:10]) <= MAX_PID or len(text) > len(str(MAX_PID)):
        message = f"{text!r} is not a process id"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def interval(text: str) -> float:
    """Parse a number of seconds that is long enough to sleep for."""
    value = seconds(text)
    if value < LEAST_INTERVAL_S:
        message = f"{text!r} is too short; give at least {LEAST_INTERVAL_S} seconds"
        raise argparse.ArgumentTypeError(message)
    return value


def port(text: str) -> int:
    """Parse a TCP port; 0 is any free one."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_PORT)) and int(text) <= MAX_PORT):
        message = f"{text!r} is not a port; give 0 to {MAX_PORT}"
        raise argparse.ArgumentTypeError(message)
    return int(text)
