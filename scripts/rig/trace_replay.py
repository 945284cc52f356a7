"""Replay a production trace on four ranks while other processes publish random limits, and verify what came of it."""

from __future__ import annotations

import argparse
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rig_process import TRACE, Engine, Publication, find_differences

RANKS = 4
TRACE_REQUESTS = 12031
TIME_LIMIT_S = 120.0
SPREAD_S = 8.0
"""Over how many seconds the publications are spread; shorter than the replay takes on two cores."""

ACCEPTED, SUPERSEDED = 0, 5


def main() -> int:
    """Run the check; the exit code is 0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--publications", type=int, default=50, metavar="N", help="how many to publish (default 50)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), metavar="S")
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE", help="trace in the Mooncake format")
    options = parser.parse_args()
    if not options.trace.is_file():
        print(f"no trace at {options.trace}; generating as many requests instead")
    load = ["--trace", str(options.trace)] if options.trace.is_file() else ["--requests", str(TRACE_REQUESTS)]
    print(f"seed {options.seed}")
    with Engine("--tp", str(RANKS), *load, instance="trace-check") as engine:
        plan = _plan(random.Random(options.seed), options.publications)  # noqa: S311 - moments and limits
        with ThreadPoolExecutor(len(plan)) as pool:
            publications = list(pool.map(lambda one: _publish(engine, *one), plan))
        report = engine.finish()
        took_s = engine.now()
    _print_updates(report)
    return _conclude(report, publications, took_s)


def _plan(rng: random.Random, publications: int) -> list[tuple[float, str]]:
    """Choose moments and limits: nothing, everything, and sizes of every order of magnitude."""
    moments = sorted(rng.random() * SPREAD_S for _ in range(publications))
    return [(moment, rng.choice(("0", "-1", *[str(int(10 ** rng.uniform(2, 6.5)))] * 8))) for moment in moments]


def _publish(engine: Engine, moment: float, limit: str) -> Publication:
    engine.sleep_until(moment)
    return engine.publish(limit)


def _print_updates(report: dict[str, Any]) -> None:
    ranks = report["ranks"]
    print(
        f"{'revision':>8} {'limit':>10} {'step':>6} {'at s':>7} {'evicted':>10} {'idle after':>10}  latency µs by rank"
    )
    for place, update in enumerate(ranks[0]["updates"]):
        latencies = " ".join(f"{rank['updates'][place]['latency_us']:>8.0f}" for rank in ranks)
        print(
            f"{update['revision']:>8} {update['limit_tokens']:>10} {update['step']:>6} {update['time_s']:>7.3f} "
            f"{update['evicted_tokens']:>10} {update['idle_tokens_after']:>10}  {latencies}"
        )


def _conclude(report: dict[str, Any], publications: list[Publication], took_s: float) -> int:
    """Print each property and whether it held."""
    codes = [one.code for one in publications]
    first = report["ranks"][0]
    revisions = [one["revision"] for one in first["updates"]]
    differences = find_differences(report)
    checks = {
        f"{codes.count(ACCEPTED)} publications accepted, {codes.count(SUPERSEDED)} superseded, no other end": (
            codes.count(ACCEPTED) + codes.count(SUPERSEDED) == len(codes)
        ),
        f"{len(revisions)} revisions applied, only growing, the last one the newest (r{first['final_revision']})": (
            revisions == sorted(set(revisions)) and revisions[-1:] == [first["final_revision"]]
        ),
        f"updates and digest equal on all {len(report['ranks'])} ranks, idle tokens never above the limit": (
            not differences
        ),
        f"{report['requests']} requests in {took_s:.1f} s (limit {TIME_LIMIT_S:.0f} s)": (
            report["requests"] == TRACE_REQUESTS and took_s < TIME_LIMIT_S
        ),
    }
    for text, held in checks.items():
        print(f"{'ok  ' if held else 'FAIL'} {text}")
    for difference in differences:
        print(f"     {difference}")
    print(f"     {report['hit_tokens']} of {report['prompt_tokens']} prompt tokens came from the cache")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
