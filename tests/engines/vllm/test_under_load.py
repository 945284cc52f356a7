"""The limit toggled a hundred times a second while an engine with little memory works, preempts and shares prefixes."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from vllm_models import HYBRID, PLAIN, write_weights
from vllm_serving import SUPPORT, engine_environment, with_plugin

from kvcached.control import set_prefix_cache_retention_limit

if TYPE_CHECKING:
    from pathlib import Path

INSTANCE = "stress"
TOGGLE_S = 0.01
MOST_EQUAL_OUTPUTS = 0.5


def toggle(ledger_dir: Path, stop: threading.Event, statuses: Counter[str]) -> None:
    """Publish another limit every 10 ms until told to stop."""
    draw = random.Random(5)
    for turn in itertools.count(1):
        limit = draw.choice([-1, 0, 0, 1, 100, 512, 1024])
        result = set_prefix_cache_retention_limit(limit, instance_name=INSTANCE, ledger_dir=ledger_dir)
        statuses[result.status] += 1
        if stop.wait(TOGGLE_S):
            return
        assert turn < 100_000


def run_toggled(command: list[str], environment: dict[str, str], ledger_dir: Path, log: Path) -> Counter[str]:
    """Run the stress program; toggle the limit during its second round; return how the publications ended."""
    statuses: Counter[str] = Counter()
    stop = threading.Event()
    toggler = threading.Thread(target=toggle, args=(ledger_dir, stop, statuses))
    with (
        log.open("wb") as sink,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=sink, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.strip() == "toggle":
                    toggler.start()
                if line.strip() == "done":
                    time.sleep(0.1)
                    stop.set()
        finally:
            stop.set()
    if toggler.ident is not None:
        toggler.join()
    assert process.returncode == 0, log.read_text(errors="replace")[-4000:]
    return statuses


@pytest.mark.parametrize(
    ("config", "blocks", "plugins"),
    [(PLAIN, 96, []), pytest.param(HYBRID, 160, [], marks=pytest.mark.long), (PLAIN, 96, ["two_batches"])],
    ids=["plain", "hybrid", "two batches in flight"],
)
def test_outputs_and_pool_stay_right_under_a_toggled_limit(
    config: dict[str, Any],
    blocks: int,
    plugins: list[str],
    tmp_path: Path,
) -> None:
    """Greedy outputs equal those of an untoggled run, and a full scan after every step finds nothing wrong."""
    model = write_weights(config, tmp_path / "model")
    environment = engine_environment(tmp_path / "ledger", INSTANCE, POOL_CHECKER_REPORT=str(tmp_path / "pool"))
    for plugin in ["pool_checker", *plugins]:
        environment = with_plugin(environment, plugin, tmp_path)
    command = [sys.executable, str(SUPPORT / "stress.py"), str(model), str(blocks), str(tmp_path / "outputs.json")]
    statuses = run_toggled(command, environment, tmp_path / "ledger", tmp_path / "stress.log")
    peace, toggled = json.loads((tmp_path / "outputs.json").read_text())
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("pool.*"))
    print(statuses, report["counts"])
    assert report["failures"] == []
    assert toggled == peace
    assert max(Counter(map(tuple, peace)).values()) < MOST_EQUAL_OUTPUTS * len(peace)
    assert report["counts"]["preemptions"] > 0
    assert report["counts"]["evicted_blocks"] > blocks
    assert report["counts"]["scans"] >= report["counts"]["steps"] > 0
    assert statuses.keys() == {"accepted"}
