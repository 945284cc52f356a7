"""The options that ``set`` and ``cap`` share: to whom, under which conditions, and whether to wait."""

from __future__ import annotations

from kvcached.control.commands import shared_options
from kvcached.instance_patterns import ANY, check_name_or_pattern

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import argparse

DEFAULT_WAIT_S = 60.0

LIMIT_HELP = "tokens: 16000, 16k, 2m, unlimited or none; or 50%% of the capacity, or 4GiB, 500MB of KV"

EXIT_CODES = """\
exit codes:
  0 accepted (with --wait: applied)   2 wrong usage   4 partial
  3 unavailable, or the engine ended or restarted while waiting
  5 superseded                        6 timed out     7 the engine refuses it
  with several instances, the highest of theirs"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare everything but LIMIT."""
    targets = parser.add_mutually_exclusive_group(required=True)
    targets.add_argument(
        "--instance", metavar="NAME", type=_name_or_pattern, help="the instance's name, or a pattern such as 'chat-*'"
    )
    targets.add_argument("--all", action="store_const", const=ANY, dest="instance", help="every live instance")
    shared_options.add_ledger_dir(parser)
    _add_conditions(parser)
    parser.add_argument(
        "--note", metavar="TEXT", type=shared_options.note, default="", help="the reason, for status --history"
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--wait",
        metavar="SECONDS",
        nargs="?",
        type=shared_options.seconds_or_limit,
        const=DEFAULT_WAIT_S,
        help=f"wait until it is applied and the excess is evicted (default {DEFAULT_WAIT_S:.0f} s)",
    )
    when.add_argument("--dry-run", action="store_true", help="show what would be evicted, and publish nothing")
    shared_options.add_json(parser)
    _add_fleet(parser)


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    fleet = parser.add_argument_group("on all nodes of a fleet")
    shared_options.add_fleet(fleet)
    fleet.add_argument(
        "--where", metavar="K=V", type=shared_options.label, action="append", help="only on nodes with this label"
    )
    fleet.add_argument("--expect", metavar="N", type=shared_options.revision, help="with --wait: at least N targets")
    fleet.add_argument(
        "--waves", metavar="P,P", type=shared_options.waves, help="in steps, such as 1,10,50,100 percent"
    )
    shared_options.add_wave_options(fleet)


def _add_conditions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--if-revision",
        metavar="N",
        type=shared_options.revision,
        help="publish only if the instance's highest revision is N",
    )
    parser.add_argument(
        "--if-incarnation",
        metavar="HEX",
        type=shared_options.incarnation,
        help="publish only if the instance has not restarted since status --json showed this incarnation",
    )
    parser.add_argument(
        "--if-different",
        action="store_true",
        help="publish nothing, and print unchanged, if this is already desired everywhere",
    )


def _name_or_pattern(text: str) -> str:
    return shared_options.checked(check_name_or_pattern, text)
