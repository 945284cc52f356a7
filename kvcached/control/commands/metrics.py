"""``kvcached-control metrics``: the state of all instances for Prometheus, printed once or served."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvcached.control import exit_codes
from kvcached.control.commands.shared_options import add_ledger_dir, port
from kvcached.control.rendering.text import complain
from kvcached.settings import choose_ledger_dir

if TYPE_CHECKING:
    import argparse

LOOPBACK = "127.0.0.1"

EPILOG = """\
examples:
  kvcached-control metrics
  kvcached-control metrics --format prometheus > kvcached.prom
  kvcached-control metrics --port 9477
Needs the package prometheus_client (pip install prometheus-client). Nobody is
asked for a password: whoever can connect to the address can read the metrics."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("metrics", help="print or serve metrics for Prometheus", epilog=EPILOG)
    add_ledger_dir(parser)
    parser.add_argument("--port", metavar="P", type=port, help="serve over HTTP until interrupted (0: any free port)")
    parser.add_argument(
        "--listen", metavar="ADDRESS", default=LOOPBACK, help=f"the address to serve at (default {LOOPBACK})"
    )
    parser.add_argument(
        "--format",
        choices=("openmetrics", "prometheus"),
        default="openmetrics",
        help="the format to print: OpenMetrics, or the older text format that node_exporter reads from files",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print or serve; the exit code."""
    path = choose_ledger_dir(arguments.ledger_dir)
    try:
        from kvcached.control.rendering.prometheus import print_once, serve  # noqa: PLC0415 - needs an optional package
    except ImportError as error:
        complain(f"metrics need the package prometheus_client ({error}); pip install prometheus-client")
        return exit_codes.PROBLEM
    if arguments.port is None:
        return print_once(path, older=arguments.format == "prometheus")
    import signal  # noqa: PLC0415 - for a server only

    signal.signal(signal.SIGTERM, _end)
    try:
        serve(path, arguments.listen, arguments.port)
    except KeyboardInterrupt:
        return exit_codes.OK
    except OSError as error:
        where = f"{arguments.listen} port {arguments.port}"
        complain(f"cannot serve at {where}: {error.strerror or error}")
        return exit_codes.PROBLEM
    return exit_codes.OK


def _end(*_: object) -> NoReturn:
    raise KeyboardInterrupt
