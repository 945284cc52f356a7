"""``kvcached-agent``: applies a fleet's desired documents to the engines of one ledger directory."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from kvcached import __version__
from kvcached.errors import KvcachedError
from kvcached.fleet.agent import Agent, NodeIdentity
from kvcached.fleet.agent_lock import AgentLock
from kvcached.fleet.bounds import NodeBounds
from kvcached.fleet.fleet_url import FLEET_VARIABLE, FleetUrlError, parse_fleet_url
from kvcached.fleet.sources import open_source
from kvcached.limits import parse_limit
from kvcached.settings import choose_ledger_dir, is_instance_name

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "kvcached-agent"

DEFAULT_LEASE_S = 60
LEAST_LEASE_S = 3
MOST_DIGITS = 4

EPILOG = """\
examples:
  kvcached-agent --fleet file:/etc/kvcached/desired.json --status-file /run/kvcached/status.json
  kvcached-agent --fleet etcds://h1:2379,h2:2379/prod --label gpu=H100
Runs until it is stopped. Exit codes: 0 stopped, 1 cannot run, 2 wrong usage."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent until SIGTERM or Ctrl-C; the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=f"{PROGRAM}: %(message)s")
    try:
        return _run(arguments)
    except FleetUrlError as error:
        parser.error(str(error))
    except KvcachedError as error:
        logging.getLogger(PROGRAM).error("%s", error)  # noqa: TRY400 - a sentence, not a traceback
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Apply a fleet's desired limits and caps to the engines of one ledger directory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--fleet", metavar="URL", default=os.environ.get(FLEET_VARIABLE), help=f"default: {FLEET_VARIABLE}")
    add("--ledger-dir", metavar="DIR", help="default: KVCACHED_LEDGER_DIR, else /dev/shm/kvcached-<uid>")
    add("--node", metavar="NAME", type=_node, default=socket.gethostname(), help="default: the host's name")
    add("--label", metavar="K=V", type=_label, action="append", default=[], help="a label that documents may select")
    for what in ("limit", "cap"):
        add(f"--min-{what}", metavar="LIMIT", type=_tokens, default=0, help=f"refuse a smaller {what}")
        add(f"--max-{what}", metavar="LIMIT", type=_tokens, default=-1, help=f"refuse a larger {what}")
    add("--status-file", metavar="PATH", help="for a file source: where to write what became of the documents")
    add(
        "--lease",
        metavar="SECONDS",
        type=_lease,
        default=DEFAULT_LEASE_S,
        help=f"for etcd: after how many seconds a silent agent counts as lost (default {DEFAULT_LEASE_S})",
    )
    add("-V", "--version", action="version", version=f"{PROGRAM} {__version__}")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    bounds = NodeBounds(arguments.min_limit, arguments.max_limit, arguments.min_cap, arguments.max_cap)
    node = NodeIdentity(arguments.node, dict(arguments.label), bounds)
    ledger_dir = choose_ledger_dir(arguments.ledger_dir)
    source = open_source(parse_fleet_url(arguments.fleet), node, ledger_dir, arguments.status_file, arguments.lease)
    lock = AgentLock(ledger_dir)
    agent = Agent(node, ledger_dir, source)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    try:
        agent.run(on_ready=_tell_ready)
    finally:
        lock.close()
    return 0


def _tell_ready() -> None:
    """Tell whoever started this program that it follows: a line for people, and a datagram for systemd."""
    logging.getLogger(PROGRAM).info("ready")
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            notifier.send(b"READY=1")


def _node(text: str) -> str:
    if not is_instance_name(text):
        message = f"{text!r} is not a node name; use 1 to 63 of A-Z a-z 0-9 . _ -"
        raise argparse.ArgumentTypeError(message)
    return text


def _lease(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS and int(text) >= LEAST_LEASE_S):
        message = f"{text!r} is not a number of seconds from {LEAST_LEASE_S} up"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals) or not text.isprintable():
        message = f"{text!r} is not a label; write NAME=VALUE"
        raise argparse.ArgumentTypeError(message)
    return name, value


def _tokens(text: str) -> int:
    try:
        return parse_limit(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
