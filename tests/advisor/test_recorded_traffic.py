"""Curves of recorded traffic: those of an exact cache, and of a simulator that others wrote."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.traces import BLOCK, requests, written

from kvcached.advisor.curve import value_at
from kvcached.advisor.replay import replay
from kvcached.control.queries.recorded_traffic import read_recorded
from kvcached.workload.trace import read_trace

if TYPE_CHECKING:
    from support.commands import Control

PRODUCTION = Path(__file__).resolve().parents[3] / "shared" / "data" / "mooncake_conversation_trace.jsonl"


def exact_rate(lines: list[dict[str, Any]], limit: int) -> float:
    """Return the hit rate of a least-recently-used cache of ``limit`` tokens, for requests one after the other."""
    idle: OrderedDict[int, None] = OrderedDict()
    hits = prompts = 0
    for line in lines:
        ids = line["hash_ids"]
        hittable = (line["input_length"] - 1) // BLOCK
        found = 0
        while found < hittable and ids[found] in idle:
            found += 1
        hits += found * BLOCK
        prompts += line["input_length"]
        for one in ids:
            idle.pop(one, None)
        idle.update(dict.fromkeys(reversed(ids)))  # the tail goes first
        while len(idle) * BLOCK > limit:
            idle.popitem(last=False)
    return hits / prompts


def test_curve_of_a_trace_is_that_of_an_exact_cache(tmp_path: Path) -> None:
    """At every limit that is looked at the rate is that of a cache of that size."""
    lines = requests(3, 300, 20)
    curve = read_recorded(str(written(tmp_path / "chats.jsonl", lines)), BLOCK).curve
    for limit in curve.limits[::3]:
        assert value_at(curve.limits, curve.values, limit) == pytest.approx(exact_rate(lines, limit), abs=1e-9)


def test_command_draws_the_curve_and_prints_it_as_json(control: Control, tmp_path: Path) -> None:
    """``advise --trace`` advises a limit without any engine, and a bad file is refused by line."""
    trace = written(tmp_path / "chats.jsonl", requests(4, 300, 20))
    shown = control.run("advise", "--trace", str(trace))
    assert shown.returncode == 0, shown.stderr
    assert "300 requests" in shown.stdout
    assert " A" in shown.stdout
    said = control.json("advise", "--trace", str(trace), "--block-tokens", "512")
    assert said["curve"][0]["limit_tokens"] == 0
    assert said["advised_limit_tokens"] > 0
    refused = control.run("advise", "--trace", str(trace), "--block-tokens", "16")
    assert (refused.returncode, "line 1" in refused.stderr) == (2, True)


@pytest.mark.needs_module("kvcache_sim")
@pytest.mark.skipif(not PRODUCTION.exists(), reason="the trace is not in this checkout")
def test_curve_agrees_with_an_independent_simulator(tmp_path: Path) -> None:
    """On a production trace the rate at each budget is within 0.01 of that of the registry's kvcache-simulator."""
    from kvcache_sim.plan import build_execution_plan  # noqa: PLC0415 - only where it is installed
    from kvcache_sim.policies import simulate_policy  # noqa: PLC0415
    from kvcache_sim.trace import parse_trace_file  # noqa: PLC0415

    lines = [json.loads(line) | {"output_length": 0} for line in PRODUCTION.read_text().splitlines()[:3000]]
    trace = written(tmp_path / "production.jsonl", lines)
    requests = [arrival.request for arrival in read_trace(trace, BLOCK)]
    curve = replay(requests, BLOCK, counted_from=len(requests) // 2)  # the window of the other one: its second half
    plan = build_execution_plan(parse_trace_file(str(trace), block_size=BLOCK), warmup_fraction=0.5)
    for limit in (250_000, 1_000_000, 4_000_000, 12_000_000):
        other = simulate_policy(plan, "lru", limit // BLOCK)
        own = value_at(curve.limits, curve.values, limit)
        print(f"{limit:>12,} tokens: {own:.4f} here, {other.hitRate:.4f} there")
        assert other.measurementMode == "fixed_window"
        assert own == pytest.approx(other.hitRate, abs=0.01)
