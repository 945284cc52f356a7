"""The advisor in real engines: what the run at one limit predicts for others is what runs at those measure."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
from vllm_serving import application, control, engine_environment, wait_until

from kvcached.advisor.curve import value_at

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.long

LIMITS = (0, 1500, 4000, 9000)
POOL_BLOCKS = 700
WITHIN = 0.03


def advice(ledger_dir: Path, *options: str) -> dict[str, Any]:
    """Return what ``advise --json`` says of the only replica."""
    done = control("advise", "--instance", "advised", "--json", *options, ledger_dir=ledger_dir)
    answer: dict[str, Any] = json.loads(done.stdout)
    (replica,) = answer["replicas"]
    return dict(replica)


def run_at(limit: int, model: Path, directory: Path) -> dict[str, Any]:
    """Serve the workload at a limit; return what the advisor says then, and how often the engine preempted."""
    ledger_dir = directory / f"ledger-{limit}"
    ledger_dir.mkdir(mode=0o700)
    environment = engine_environment(ledger_dir, "advised", KVCACHED_MAX_CACHED_TOKENS=str(limit))
    log = directory / f"log-{limit}"
    options = {"num_gpu_blocks_override": POOL_BLOCKS, "disable_log_stats": False}
    with application(model, log, environment, program="advised.py", one_process=True, **options):
        found = wait_until(lambda: advice(ledger_dir, "--window", "long"), 30)
    print(limit, {key: found[key] for key in found if key != "curve"}, flush=True)
    found["preemptions"] = int(re.findall(r"^preemptions (\d+)$", log.read_text(errors="replace"), re.MULTILINE)[-1])
    print(limit, found["preemptions"], "preemptions", flush=True)
    return found


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Serve the workload at each limit."""
    directory = tmp_path_factory.mktemp("advised")
    with ThreadPoolExecutor(len(LIMITS)) as pool:
        found = pool.map(lambda limit: run_at(limit, model, directory), LIMITS)
        return dict(zip(LIMITS, found, strict=True))


def test_each_run_predicts_the_others(runs: dict[int, dict[str, Any]]) -> None:
    """Each run's curve gives the other runs' measured hit rates within 0.03."""
    errors = {}
    for one, other in permutations(LIMITS, 2):
        curve = runs[one]["curve"]
        limits = [point["limit_tokens"] for point in curve[1:]]
        predicted = value_at(limits, [point["hit_rate"] for point in curve], other)
        errors[one, other] = abs(predicted - runs[other]["measured_hit_rate"])
    print({pair: round(error, 4) for pair, error in errors.items()})
    assert max(errors.values()) <= WITHIN


def test_every_request_is_counted_once(runs: dict[int, dict[str, Any]]) -> None:
    """All runs count the same requests: aborted and preempted ones once, those without look-up not at all."""
    assert len({found["requests"] for found in runs.values()}) == 1
    assert all(found["preemptions"] > 0 for found in runs.values())


def test_advisor_works_without_trouble(runs: dict[int, dict[str, Any]]) -> None:
    """No run's advisor has failed, and model and engine agree at the limit in force."""
    for found in runs.values():
        assert (
            not found["refused"] or "cannot be reached" in found["refused"] or "needs no idle cache" in found["refused"]
        )
        assert abs(found["model_error"]) <= WITHIN
