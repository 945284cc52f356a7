"""Options that several commands share."""

from __future__ import annotations

import argparse

from kvcached.settings import SettingsError, check_instance_name

LEAST_INTERVAL_S = 0.1
"""How short an interval may be."""

MAX_PORT = 65535

MAX_PID = 2**22
"""The largest process id that Linux gives out."""

_ENDLESS = float("inf")

MAX_NOTE_BYTES = 55
"""How long a note may be: what a ledger's record of publications has room for."""


def add_ledger_dir(parser: argparse.ArgumentParser) -> None:
    """Declare ``--ledger-dir``."""
    parser.add_argument(
        "--ledger-dir",
        metavar="DIR",
        help="the ledger directory (default: KVCACHED_LEDGER_DIR, else /dev/shm/kvcached-<uid>)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def instance_name(text: str) -> str:
    """Parse an instance name."""
    try:
        return check_instance_name(text)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def seconds(text: str) -> float:
    """Parse a number of seconds, not negative and not endless."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < _ENDLESS:
        message = f"{text!r} is not a number of seconds"
        raise argparse.ArgumentTypeError(message)
    return value


def note(text: str) -> str:
    """Parse a note: what a ledger's record holds whole, and what a terminal may show."""
    if len(text.encode(errors="surrogateescape")) > MAX_NOTE_BYTES or not text.isprintable():
        message = f"a note is one line of at most {MAX_NOTE_BYTES} bytes"
        raise argparse.ArgumentTypeError(message)
    return text


def share(text: str) -> float:
    """Parse a share or a rate: above 0, up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
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
        message = f"{text!r} is too short an interval; give at least {LEAST_INTERVAL_S} seconds"
        raise argparse.ArgumentTypeError(message)
    return value


def port(text: str) -> int:
    """Parse a TCP port; 0 is any free one."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_PORT)) and int(text) <= MAX_PORT):
        message = f"{text!r} is not a port; give 0 to {MAX_PORT}"
        raise argparse.ArgumentTypeError(message)
    return int(text)
