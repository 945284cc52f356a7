"""``kvcached-control cap``: publish how many tokens of KV instances may hold in all; as ``set`` in everything else."""

from __future__ import annotations

from kvcached.control.commands import publishing_options, shared_options
from kvcached.control.commands.set import USAGE, run
from kvcached.values import Bound

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import argparse

EPILOG = f"""\
examples:
  kvcached-control cap 50%% --instance my-model --wait
  kvcached-control cap 4GiB --instance 'chat-*' --dry-run
  kvcached-control cap unlimited --all
{publishing_options.EXIT_CODES}"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    text = "change how many tokens of KV an instance may hold, in use and idle"
    parser = commands.add_parser("cap", help=text, usage=USAGE, epilog=EPILOG)
    parser.add_argument(
        "limit", metavar="LIMIT", nargs="?", type=shared_options.limit, help=publishing_options.LIMIT_HELP
    )
    publishing_options.add(parser)
    parser.set_defaults(run=run, acts=True, bound=Bound.CAP, of_max=None)
