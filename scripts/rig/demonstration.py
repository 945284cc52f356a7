"""Start a four-rank engine, change its limit and its cap from other processes, and show what every rank did."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demonstration_picture import draw
from memory_sampler import MemorySampler
from rich.console import Console
from rich.table import Table
from rig_process import TRACE, Engine, Publication, find_differences

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = 4
INSTANCE = "demo"


@dataclass(frozen=True)
class Scene:
    """A load, and the publications made into it: when (seconds from ``ready``), which command, how many tokens."""

    load: tuple[str, ...]
    startup_limit: str
    publications: tuple[tuple[float, str, str], ...]
    last_limit: str
    """Published once the engine idles."""


TRACE_SCENE = Scene(
    load=("--speed", "140", "--token-bytes", "32"),
    startup_limit="400000",
    publications=((5.0, "set", "2500k"), (13.0, "cap", "1m"), (18.0, "cap", "unlimited"), (22.0, "set", "250k")),
    last_limit="100k",
)
GENERATED_SCENE = Scene(
    load=("--requests", "1500", "--speed", "6", "--token-bytes", "1024"),
    startup_limit="40000",
    publications=((5.0, "set", "250k"), (13.0, "cap", "100k"), (18.0, "cap", "unlimited"), (22.0, "set", "25k")),
    last_limit="10k",
)
LINGER_S = 10.0
ELASTIC_AFTER_S = "1"
IDLE_FOR_S = 2.0
"""How long the engine is seen to have no request before it counts as idle."""


def main() -> int:
    """Run the demo; the exit code is 0 if all ranks did the same and kept to every limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo.png"), metavar="FILE", help="the picture to write")
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE", help="a load in the Mooncake format")
    options = parser.parse_args()
    scene = GENERATED_SCENE
    load = list(scene.load)
    if options.trace.is_file():
        scene = TRACE_SCENE
        load = ["--trace", str(options.trace), *scene.load]
    environment = {
        "KVCACHED_MAX_CACHED_TOKENS": scene.startup_limit,
        "KVCACHED_ELASTIC": "1",
        "KVCACHED_ELASTIC_AFTER": ELASTIC_AFTER_S,
    }
    timeline = options.out.with_suffix(".jsonl")
    arguments = ["--tp", str(RANKS), *load, "--linger", str(LINGER_S), "--timeline", str(timeline)]
    with Engine(*arguments, instance=INSTANCE, environment=environment) as engine:
        sampler = MemorySampler(engine)
        sampler.start()
        _say(f"$ {' '.join(f'{name}={value}' for name, value in environment.items())} {_spell(engine.command)} &")
        publications = [_publish(engine, *publication) for publication in scene.publications]
        _wait_until_idle(engine)
        publications.append(_publish(engine, engine.now(), "set", scene.last_limit))
        report = engine.finish()
        sampler.join()
    samples = [json.loads(line) for line in timeline.read_text(encoding="utf-8").splitlines()]
    timeline.unlink()
    _print_table(report)
    _print_caps(report)
    draw(options.out, samples, publications, report, sampler.samples)
    return _conclude(report, publications, options.out)


def _publish(engine: Engine, moment: float, command: str, limit: str) -> Publication:
    """Publish ``limit`` at ``moment``, showing the command and what it printed."""
    engine.sleep_until(moment)
    _say(f"\n{engine.now():5.1f} s  $ {_spell(engine.control(command, limit, '--wait'))}")
    publication = engine.publish(limit, "--wait", command=command)
    _say(f"         {publication.output}")
    return publication


def _wait_until_idle(engine: Engine) -> None:
    idle_since = engine.now()
    while engine.now() - idle_since < IDLE_FOR_S and engine.process.poll() is None:
        time.sleep(0.1)
        if engine.active_tokens() > 0:
            idle_since = engine.now()


def _spell(command: Sequence[str]) -> str:
    """Spell a command as a person would type it, without the demo's own folders."""
    words = ["python", *command[1:]]
    for option in ("--ledger-dir", "--report", "--timeline"):
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
    return shlex.join(words)


def _print_table(report: dict[str, Any]) -> None:
    table = Table(title="What every rank did, and when")
    for name in ("revision", "limit", "rank", "at step", "at s", "evicted", "idle after", "poll to applied"):
        table.add_column(name, justify="right")
    for place, _ in enumerate(report["ranks"][0]["updates"]):
        for rank in report["ranks"]:
            one = rank["updates"][place]
            first = rank["rank"] == 0
            table.add_row(
                f"r{one['revision']}" if first else "",
                f"{one['limit_tokens']:,}" if first else "",
                str(rank["rank"]),
                str(one["step"]),
                f"{one['time_s']:.3f}",
                f"{one['evicted_tokens']:,}",
                f"{one['idle_tokens_after']:,}",
                f"{one['latency_us'] / 1000:.2f} ms",
                end_section=rank["rank"] == RANKS - 1,
            )
    Console(width=100).print("", table)


def _print_caps(report: dict[str, Any]) -> None:
    table = Table(title="What every rank did with the caps")
    for name in ("revision", "cap", "rank", "at step", "steps", "withheld", "memory returned by then"):
        table.add_column(name, justify="right")
    for place, _ in enumerate(report["ranks"][0]["caps"]):
        for rank in report["ranks"]:
            one = rank["caps"][place]
            first = rank["rank"] == 0
            table.add_row(
                f"r{one['revision']}" if first else "",
                f"{one['cap_tokens']:,}" if first else "",
                str(rank["rank"]),
                str(one["step"]),
                str(one["steps"]),
                f"{one['withheld_tokens_after']:,}",
                f"{one['returned_bytes_after'] / 1e6:,.1f} MB",
                end_section=rank["rank"] == RANKS - 1,
            )
    Console(width=100).print("", table)


def _conclude(report: dict[str, Any], publications: Sequence[Publication], picture: Path) -> int:
    """Say whether all went as it should."""
    differences = find_differences(report)
    differences += [
        f"{one.command} {one.limit} ended with code {one.code}: {one.output}" for one in publications if one.code
    ]
    share = report["hit_tokens"] / max(1, report["prompt_tokens"])
    _say(f"{report['requests']:,} requests served; {share:.1%} of their prompt tokens came from the cache.")
    for difference in differences:
        _say(f"NOT AS IT SHOULD BE: {difference}")
    if not differences:
        _say(f"All {RANKS} ranks held the same blocks at every step (digest {report['ranks'][0]['digest']}).")
    _say(f"The picture is in {picture}.")
    return 1 if differences else 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
