"""Predicts hit rates at limits that were never in force, and measures them by real runs of the embedded engine.

For each workload one run at the limit in force is asked (``kvcached-control advise``) for the rates at eight other
limits. Then the same workload runs at each of these. Both figures are those of the window *long*: they mean the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rig_process import TRACE, Engine

from kvcached.control.queries.recommendation import Advice, Goal, advise_instance

if TYPE_CHECKING:
    from collections.abc import Sequence

INSTANCE = "advisor-check"
MEAN_ERROR = 0.01
LARGEST_ERROR = 0.02
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Workload:
    """A load for the rig, its size, the limit it is predicted from, and those it is predicted for."""

    name: str
    arguments: tuple[str, ...]
    requests: int
    in_force: int
    others: tuple[int, ...]


TRACE_LIMITS = (0, 131_072, 262_144, 524_288, 1_000_000, 1_500_000, 2_000_000, 2_500_000)
CHAT_LIMITS = (0, 8_000, 24_000, 64_000, 96_000, 128_000, 160_000, 192_000)
CHAT_REQUESTS = 6000


def workloads() -> list[Workload]:
    """Return the trace, if it lies beside the checkout, and three generated loads."""
    chats = [
        Workload(
            f"chats-{seed}", ("--requests", str(CHAT_REQUESTS), "--seed", str(seed)), CHAT_REQUESTS, 40_000, CHAT_LIMITS
        )
        for seed in (101, 102, 103)
    ]
    if not TRACE.is_file():
        print(f"no trace at {TRACE}; generated loads only")
        return chats
    return [Workload("trace", ("--trace", str(TRACE)), 12_031, 750_000, TRACE_LIMITS), *chats]


def run_at(workload: Workload, limit: int) -> Advice:
    """Run a workload at a limit; return what the advisor says once it idles."""
    with Engine(
        *workload.arguments,
        "--linger",
        "3600",
        instance=INSTANCE,
        environment={"KVCACHED_MAX_CACHED_TOKENS": str(limit)},
    ) as engine:
        ledger_dir = str(engine.folder / "ledger")
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(0.5)
            (advice,) = advise_instance(INSTANCE, ledger_dir, Goal(share=0.9), "long")
            if advice.requests == workload.requests:
                return advice
    message = f"{workload.name} at {limit}: not done after {_PATIENCE_S:.0f} s"
    raise SystemExit(message)


def check(workload: Workload) -> tuple[bool, Advice, dict[int, float]]:
    """Predict, measure, print; return whether the errors are small, the prediction and the measured rates."""
    advice = run_at(workload, workload.in_force)
    curve = advice.curve
    if curve is None:
        message = f"{workload.name}: no curve ({advice.refused})"
        raise SystemExit(message)
    print(f"{workload.name}: in force {workload.in_force:,}, model error {curve.model_error:+.4f}")
    measured: dict[int, float] = {}
    errors = []
    for limit in workload.others:
        other = run_at(workload, limit).curve
        measured[limit] = other.measured if other else 0.0
        predicted = curve.at(limit)
        errors.append(abs(predicted - measured[limit]))
        print(
            f"  limit {limit:>9,}: predicted {predicted:.4f}, measured {measured[limit]:.4f}, off by {errors[-1]:.4f}"
        )
    mean, largest = sum(errors) / len(errors), max(errors)
    held = mean <= MEAN_ERROR and largest <= LARGEST_ERROR
    print(f"{'ok  ' if held else 'FAIL'} {workload.name}: mean error {mean:.4f} (≤ {MEAN_ERROR}), ", end="")
    print(f"largest {largest:.4f} (≤ {LARGEST_ERROR})", flush=True)
    return held, advice, {workload.in_force: curve.measured, **measured}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; the exit code is 0 if all errors are small."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", action="append", metavar="NAME", help="only this one (trace, chats-101 …)")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the last workload's curve and runs into FILE"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="write all figures as JSON")
    options = parser.parse_args(arguments)
    chosen = [one for one in workloads() if options.workload is None or one.name in options.workload]
    results: dict[str, Any] = {}
    all_held = bool(chosen)
    for workload in chosen:
        held, advice, measured = check(workload)
        all_held &= held
        results[workload.name] = {**advice.to_dict(), "runs": measured}
        if options.picture:
            from kvcached.control.rendering.curve_picture import draw_curves  # noqa: PLC0415 - needs matplotlib

            title = "One run at one limit predicts the hit rate at all others"
            draw_curves(str(options.picture), workload.name, [advice], [measured], title)
    if options.results:
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all_held else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
