"""``python -m kvcached.rig``: run the embedded engine over a workload."""

from __future__ import annotations

import argparse
import mmap
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.rig.chats import CHAT_BLOCK_TOKENS, LONGEST_TOKENS, generate_chats, longest_request
from kvcached.rig.config import CHUNK_BLOCKS, TOKEN_BYTES, RigConfig
from kvcached.rig.scheduler import DEFAULT_STEP_TOKENS
from kvcached.settings import (
    INSTANCE_NAME_VARIABLE,
    LEDGER_DIR_VARIABLE,
    Settings,
    SettingsError,
    read_settings,
)
from kvcached.workload.trace import TRACE_BLOCK_TOKENS, TraceError, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcached.workload.request import Arrival

EXIT_FAILED = 1
EXIT_USAGE = 2

DEFAULT_REQUESTS = 1000

MOST_RANKS = 128
"""How many processes a run has at most; a mistyped number must not be the end of the machine."""

_CHAT_CAPACITY_TOKENS = 262_144
_TRACE_CAPACITY_TOKENS = 3_000_000

_EPILOG = """\
The limit and the cap at the start, the ledger directory and the instance name also come from
KVCACHED_MAX_CACHED_TOKENS, KVCACHED_MAX_KV_TOKENS, KVCACHED_LEDGER_DIR and KVCACHED_INSTANCE_NAME; arguments win.
KVCACHED_ELASTIC=1 returns the memory of blocks that stay free. With --speed, requests arrive by their time stamps, that
many times as fast; without it, as fast as the engine takes them. SIGINT and SIGTERM end a run after the current
step, and the report is still written."""


def main(arguments: list[str] | None = None) -> int:
    """Run the rig as ``arguments`` (default: the command line) say; return the exit code."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    try:
        config = _configure(options, _read_settings(options))
        arrivals, longest_tokens = _load(options, config.capacity_tokens)
        _check_writable(options.report, options.timeline)
    except (SettingsError, TraceError, _UsageError) as error:
        _complain(parser.prog, str(error))
        return EXIT_USAGE
    return _run(parser.prog, options, replace(config, longest_tokens=longest_tokens), arrivals)


class _UsageError(ValueError):
    """Arguments that are each legal but cannot be used together, or here."""


def _run(prog: str, options: argparse.Namespace, config: RigConfig, arrivals: Iterable[Arrival]) -> int:
    # Threads of a maths library would survive in no forked rank, and two cores have no use for them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from kvcached.rig.group import Group, GroupError  # noqa: PLC0415 - usage errors are told before torch is loaded
    from kvcached.rig.run_report import build_report, write_report, write_timeline  # noqa: PLC0415

    settings = config.settings

    def say_ready() -> None:
        if settings.disabled:
            _complain(prog, "KVCACHED_DISABLE=1: serving without a limit or control")
        else:
            print(f"ready {settings.instance_name} {settings.ledger_dir}", flush=True)

    try:
        results = Group(config, arrivals, say_ready).run()
    except GroupError as error:
        _complain(prog, str(error))
        return EXIT_FAILED
    if options.report is not None:
        write_report(options.report, build_report(config, results))
    if options.timeline is not None:
        write_timeline(options.timeline, results)
    return 0


def _complain(prog: str, message: str) -> None:
    """Print one line to standard error, or to nobody where there is none: never among the results."""
    if sys.stderr is not None:
        print(f"{prog}: {message}", file=sys.stderr, flush=True)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcached.rig",
        description="The embedded engine: N ranks in a gloo group, each with a prefix cache under one run-time limit.",
        epilog=_EPILOG,
    )
    parser.add_argument("--tp", type=_positive, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    parser.add_argument("--pp", type=_positive, default=1, metavar="N", help="stages of --tp ranks each (default 1)")
    parser.add_argument("--instance", metavar="NAME", help="instance name (default rig-<pid>)")
    parser.add_argument("--ledger-dir", metavar="DIR", help="ledger directory")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--trace", type=Path, metavar="FILE", help="replay FILE, in the Mooncake format")
    load.add_argument("--requests", type=_count, metavar="N", help=f"generate N requests (default {DEFAULT_REQUESTS})")
    parser.add_argument(
        "--block-tokens",
        type=_positive,
        metavar="N",
        help=f"tokens per hash id of the trace (default {TRACE_BLOCK_TOKENS})",
    )
    parser.add_argument("--seed", type=_integer, default=0, metavar="S", help="seed of the generated load (default 0)")
    parser.add_argument("--capacity-tokens", type=_positive, metavar="N", help="size of each rank's cache")
    parser.add_argument(
        "--token-bytes",
        type=_positive,
        default=TOKEN_BYTES,
        metavar="N",
        help=f"KV memory of a token on each rank (default {TOKEN_BYTES})",
    )
    parser.add_argument("--speed", type=_factor, metavar="X", help="replay arrival times X times as fast")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what every rank did as JSON")
    parser.add_argument("--linger", type=_seconds, default=0.0, metavar="S", help="seconds to stay idle after the load")
    _add_more_options(parser)
    return parser


def _add_more_options(parser: argparse.ArgumentParser) -> None:
    more = parser.add_argument_group("for tests and pictures")
    more.add_argument("--timeline", type=Path, metavar="FILE", help="write a time series of every rank as JSON lines")
    more.add_argument("--chunk-tokens", type=_positive, metavar="N", help="tokens that a step of a big drop evicts")
    more.add_argument("--step-tokens", type=_positive, default=DEFAULT_STEP_TOKENS, metavar="N", help="tokens per step")
    more.add_argument("--check", action="store_true", help="check all indexes of the cache after steps that end idle")
    more.add_argument("--guard-returned", action="store_true", help="kill a rank that touches returned memory")
    more.add_argument(
        "--fault",
        type=_fault,
        default=0,
        metavar="evict[:N]",
        help="make the first N (default: all) evictions for the limit raise, on all ranks",
    )


def _read_settings(options: argparse.Namespace) -> Settings:
    environ = dict(os.environ)
    if options.instance is not None:
        environ[INSTANCE_NAME_VARIABLE] = options.instance
    if options.ledger_dir is not None:
        environ[LEDGER_DIR_VARIABLE] = options.ledger_dir
    return read_settings("rig", environ)


def _configure(options: argparse.Namespace, settings: Settings) -> RigConfig:
    block_tokens = options.block_tokens or TRACE_BLOCK_TOKENS
    if options.trace is None:
        if options.block_tokens is not None:
            message = "--block-tokens needs --trace"
            raise _UsageError(message)
        block_tokens = CHAT_BLOCK_TOKENS
    if options.tp * options.pp > MOST_RANKS:
        message = f"--tp {options.tp} with --pp {options.pp} is more than {MOST_RANKS} processes; use fewer"
        raise _UsageError(message)
    capacity = options.capacity_tokens
    if capacity is None:
        capacity = _CHAT_CAPACITY_TOKENS if options.trace is None else _TRACE_CAPACITY_TOKENS
    if capacity < block_tokens:
        message = f"--capacity-tokens {capacity} is less than one block of {block_tokens} tokens"
        raise _UsageError(message)
    config = RigConfig(
        settings=settings,
        tp_size=options.tp,
        pp_size=options.pp,
        block_tokens=block_tokens,
        capacity_tokens=capacity,
        token_bytes=options.token_bytes,
        longest_tokens=capacity,
        chunk_tokens=options.chunk_tokens or CHUNK_BLOCKS * block_tokens,
        step_tokens=options.step_tokens,
        speed=options.speed,
        linger_s=options.linger,
        check=options.check,
        timeline=options.timeline is not None,
        fault_evictions=options.fault,
        guards_returned=options.guard_returned,
    )
    needed, present = capacity * options.token_bytes * config.world_size, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if needed > present:
        message = f"the KV of {config.world_size} ranks takes {needed:,} bytes and this machine has {present:,}"
        raise _UsageError(message)
    if len(config.gpu_ids) != config.world_size:
        message = f"KVCACHED_GPU_IDS names {len(config.gpu_ids)} members for {config.world_size} ranks"
        raise _UsageError(message)
    return config


def _load(options: argparse.Namespace, capacity_tokens: int) -> tuple[Iterable[Arrival], int]:
    """Return the workload, and how long its longest request is that fits into the cache, in tokens."""
    if options.trace is not None:
        trace = read_trace(options.trace, options.block_tokens or TRACE_BLOCK_TOKENS)
        lengths = [one.request.total_tokens for one in trace if one.request.total_tokens <= capacity_tokens]
        return trace, max(lengths, default=0)
    requests = DEFAULT_REQUESTS if options.requests is None else options.requests
    longest = min(LONGEST_TOKENS, capacity_tokens * 3 // 4)
    return generate_chats(requests, options.seed, longest), longest_request(longest)


def _check_writable(*paths: Path | None) -> None:
    """Try what will be written at the end, so that a run is not lost to a mistyped path."""
    for path in paths:
        if path is None:
            continue
        existed = path.exists()
        try:
            path.open("a", encoding="utf-8").close()
            if not existed:
                path.unlink()
        except OSError as error:
            message = f"cannot write {path}: {error.strerror}"
            raise _UsageError(message) from error


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError
    return int(text)


def _positive(text: str) -> int:
    value = _count(text)
    if value < 1:
        raise ValueError
    return value


def _integer(text: str) -> int:
    return -_count(text[1:]) if text.startswith("-") else _count(text)


def _number(text: str) -> float:
    if not text.isascii() or "_" in text or text != text.strip():
        raise ValueError
    return float(text)


def _factor(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _fault(text: str) -> int | None:
    kind, _, count = text.partition(":")
    if kind != "evict":
        raise ValueError
    return _positive(count) if count else None


for _converter, _name in (
    (_positive, "positive integer"),
    (_count, "count"),
    (_integer, "integer"),
    (_factor, "positive number"),
    (_seconds, "number of seconds"),
    (_fault, "fault"),
):
    _converter.__name__ = _name  # argparse puts it into "invalid ... value"


if __name__ == "__main__":
    sys.exit(main())
