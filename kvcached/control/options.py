"""Options that several commands share."""

from __future__ import annotations

import argparse
import math

from kvcached.settings import SettingsError, check_instance_name


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
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        message = f"{text!r} is not a number of seconds"
        raise argparse.ArgumentTypeError(message)
    return value
