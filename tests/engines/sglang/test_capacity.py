"""Caps on real servers: what they return to the operating system, and that they change nothing but the time taken."""

from __future__ import annotations

import random
import re
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from sglang_model import write_model
from sglang_server import INSTANCE, Server, prompt, wait_until

from kvcached.control import set_kv_capacity_limit
from kvcached.memory.kernel_figures import anonymous_bytes, minor_faults

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Say, Serve
    from sglang_server import Answer
    from typing_extensions import Self

POOL = 65536
"""Tokens; of 16 KiB each: 1 GiB over all ranks."""
QUARTER = POOL // 4
CONTEXT = 4096
WIDE = ("--max-total-tokens", str(POOL), "--skip-server-warmup", "--dtype", "float32")
"""In bfloat16 two of 1,024 logits are equal now and then, and what batch a request is in decides between them."""
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}
ALARMS = ("leak", "Leak", "Scheduler hit an exception", "is not reached", " failed; the engine keeps serving")
END = 2
"""The token that ends an answer."""
SEED = 14
STEADY_REQUESTS = 16


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with as much KV per token and layer as a large one, whose outputs depend on the prompt."""
    return write_model(tmp_path_factory.mktemp("wide-model"), weights=True, wide=True)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2], ids=["tp1", "tp2"])
def server(request: pytest.FixtureRequest, serve_module: Serve, wide_model: Path) -> Iterator[Server]:
    """Return a server whose returned memory is unreadable, and which ends if its pool does not add up."""
    options = ("--tp-size", str(request.param), *WIDE)
    server = serve_module(wide_model, *options, environ=STRICT, probes=("withheld", "guard"))
    yield server
    server.stop()


def pids_of(server: Server) -> list[int]:
    """Return the schedulers' processes, which hold the pool."""
    return [int(path.stem) for path in server.records_dir.glob("*.jsonl")]


def anonymous_of(server: Server) -> int:
    """Return the anonymous memory of all ranks, by the kernel's figures."""
    return sum(anonymous_bytes(pid) for pid in pids_of(server))


def check_log(server: Server) -> None:
    """Check that nothing alarming was said."""
    log = server.log()
    assert not [alarm for alarm in ALARMS if alarm in log], log[-4000:]


def fill(server: Server, first: int, count: int, length: int = 600) -> None:
    """Serve ``count`` prompts, whose KV stays cached."""
    for begin in range(first, first + count, 8):
        server.generate_all([prompt(seed, length) for seed in range(begin, min(begin + 8, first + count))], tokens=2)


@pytest.fixture
def elastic(serve: Serve, wide_model: Path) -> Server:
    """Return a server whose memory follows what its requests use.

    Its tests come before those of ``server``, which stays: its two ranks never stop looking for work.
    """
    environ = {"KVCACHED_ELASTIC": "1", "KVCACHED_ELASTIC_AFTER": "2", **STRICT}
    return serve(wide_model, *WIDE, environ=environ, probes=("withheld",))


def test_an_idle_elastic_engine_holds_its_retained_tokens_and_nothing_else(elastic: Server, say: Say) -> None:
    """After a start, and again after the limit dropped to nothing, what is free goes back by itself."""
    began = time.monotonic()
    wait_until(lambda: elastic.status()[0]["resident_bytes"] < 64 << 20, 30, "the pool of a fresh engine is returned")
    say(f"fresh pool returned {time.monotonic() - began:.1f} s after the server was up")
    fill(elastic, 3000, 24)
    # The engine's own allocations grow too, with the first requests above all: so what fell is compared with what was
    # said to be returned, not with what the process held when it was fresh.
    filled, resident = anonymous_of(elastic), elastic.status()[0]["resident_bytes"]
    assert resident > 200 << 20
    elastic.apply_limit(0)
    began = time.monotonic()
    most = 0.05 * resident
    wait_until(lambda: elastic.status()[0]["resident_bytes"] < most, 30, "the evicted tokens' memory is back")
    returned, fallen = resident - elastic.status()[0]["resident_bytes"], filled - anonymous_of(elastic)
    say(f"returned {returned >> 20} MiB after {time.monotonic() - began:.1f} s, {fallen >> 20} MiB fell")
    assert fallen >= 0.95 * returned
    assert elastic.generate(prompt(3001, 600)).cached_tokens == 0
    elastic.apply_limit(-1)
    check_log(elastic)


def faults_of(server: Server, first: int) -> list[int]:
    """Serve blocks of requests under a limit of 30 % of the pool; return the page faults of each."""
    server.apply_limit(POOL * 3 // 10)
    fill(server, first, 40)
    faults = []
    for block in range(1, 6):
        before = sum(minor_faults(pid) for pid in pids_of(server))
        fill(server, first + 100 * block, STEADY_REQUESTS)
        faults.append(sum(minor_faults(pid) for pid in pids_of(server)) - before)
    return faults


@pytest.mark.long
def test_a_steady_load_on_an_elastic_engine_pays_no_faults(
    elastic: Server, serve: Serve, wide_model: Path, say: Say
) -> None:
    """Once a load with a third of the pool in use has run for a while, it has the faults of an engine left alone.

    Those are many, and come from SGLang's own allocations, so medians are compared. What the allocator hands out again
    is counted in ``test_token_rows.py``.
    """
    returned = [elastic.status()[0]["returned_bytes"]]
    faults = faults_of(elastic, 10_000)
    returned.append(elastic.status()[0]["returned_bytes"])
    others = faults_of(serve(wide_model, *WIDE, probes=("withheld",)), 10_000)
    pages = STEADY_REQUESTS * 600 * 4
    say(f"page faults per {STEADY_REQUESTS} requests: {faults}, not elastic {others}; all their KV is {pages} pages")
    say(f"returned at the start and at the end: {returned[0] >> 20} and {returned[1] >> 20} MiB")
    assert returned[1] > 0.5 * POOL * 16384
    assert statistics.median(faults[2:]) < statistics.median(others[2:]) + pages / 4


def test_a_cap_returns_memory_and_a_raise_gives_it_back(server: Server, say: Say) -> None:
    """The processes' own memory falls by what is said to be returned, at once; raised again, the pool is whole."""
    fill(server, 1000, 16)
    before = anonymous_of(server)
    ran = server.control("cap", str(QUARTER), "--instance", INSTANCE, "--wait")
    fallen = before - anonymous_of(server)
    assert ran.code == 0, ran
    replica = server.status()[0]
    say(f"cap to a quarter: {ran.seconds:.2f} s, returned {replica['returned_bytes'] >> 20} MiB, fell {fallen >> 20}")
    assert replica["cap"]["limit_tokens"] == QUARTER
    assert replica["cap"]["outcome"] == "applied"
    assert replica["token_bytes"] == 16384
    assert replica["returns"] == "yes"
    assert replica["returned_bytes"] >= 0.95 * (POOL - QUARTER) * 16384
    assert replica["returned_bytes"] + replica["resident_bytes"] == replica["pool_bytes"]
    assert fallen >= 0.95 * replica["returned_bytes"]
    assert replica["active_tokens"] == 0
    fill(server, 1100, 8)
    assert server.generate(prompt(1107, 600), tokens=2).cached_tokens == 599
    server.apply_cap(-1)
    replica = server.status()[0]
    assert replica["active_tokens"] == 0
    assert replica["cap"]["limit_tokens"] == -1
    check_log(server)


def test_a_cap_below_one_longest_request_is_refused_and_the_floor_serves_one(server: Server) -> None:
    """The number in the refusal is one that works: a request of the greatest length gets through alone."""
    refused = server.control("cap", "1000", "--instance", INSTANCE, "--wait")
    assert refused.code == 7, refused
    found = re.search(r"needs (\d+) tokens", refused.out + refused.err)
    assert found is not None, refused
    assert server.status()[0]["cap"]["outcome"] == "rejected_below_floor"
    floor = int(found[1])
    assert CONTEXT <= floor < CONTEXT + 64
    server.apply_cap(floor)
    longest = server.generate(prompt(7, CONTEXT - 60), tokens=58)
    assert len(longest.output_ids) == 58
    server.apply_cap(-1)
    check_log(server)


def test_a_burst_waits_under_a_cap_and_nothing_dies(server: Server) -> None:
    """Prompts that together need many times the cap are all served, in chunks and with retractions."""
    server.apply_cap(CONTEXT + 64)
    crowd = [prompt(2000 + seed, 700 + 40 * seed) for seed in range(24)]
    answers = server.generate_all(crowd, tokens=40, ignore_eos=False)
    assert all(len(answer.output_ids) == 40 or answer.output_ids[-1] == END for answer in answers), answers
    server.apply_cap(-1)
    check_log(server)


def test_the_engines_own_calls_work_under_a_cap(server: Server, wide_model: Path) -> None:
    """Flush, pause and a reload of the weights succeed, and the cap holds again after each."""
    server.apply_cap(QUARTER)
    before = anonymous_of(server)
    server.generate(prompt(3, 600))
    assert "flushed" in str(server.post("/flush_cache", {}))
    assert server.generate(prompt(3, 600)).cached_tokens == 0
    for mode in ("retract", "in_place"):
        server.post("/pause_generation", {"mode": mode})
        server.apply_cap(QUARTER - 4096)
        server.apply_cap(QUARTER)
        server.post("/continue_generation", {})
    reloaded = server.post("/update_weights_from_disk", {"model_path": str(wide_model)})
    assert reloaded["success"], reloaded
    assert server.generate(prompt(3, 600)).cached_tokens == 0
    wait_until(lambda: server.status()[0]["cap"]["outcome"] == "applied", 30, "the cap holds again")
    assert server.status()[0]["cap"]["limit_tokens"] == QUARTER
    assert anonymous_of(server) < before + (64 << 20)
    server.apply_cap(-1)
    check_log(server)


@dataclass
class Toggler:
    """Publishes caps and limits at random, in a thread, until it is told to stop."""

    server: Server
    seed: int

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.published = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        generator = random.Random(self.seed)
        while not self._stop.wait(generator.uniform(0.01, 0.1)):
            if generator.random() < 0.6:
                cap = generator.choice([-1, CONTEXT + 64, 6000, 8000, QUARTER, POOL // 2])
                result = set_kv_capacity_limit(cap, instance_name=INSTANCE, ledger_dir=self.server.ledger_dir)
            else:
                result = self.server.publish(generator.choice([-1, 0, 500, 4000]))
            self.published += result.accepted


def requests() -> list[tuple[list[int], int]]:
    """Return prompts in families that begin alike, and how many tokens to answer with."""
    generator = random.Random(SEED)
    found = []
    for number in range(100):
        begin = prompt(number % 12, generator.randrange(50, 400))
        found.append((begin + prompt(5000 + number, generator.randrange(10, 200)), generator.randrange(4, 40)))
    return found


def answers_of(server: Server, rounds: int) -> list[Answer]:
    """Return what a server says to the requests, 16 of which run at a time."""
    said: list[Answer] = []
    with ThreadPoolExecutor(16) as pool:
        for _ in range(rounds):
            said += pool.map(lambda each: server.generate(*each, return_logprob=True), requests())
    return said


@pytest.mark.long
@pytest.mark.parametrize("rounds", [1, 3])
def test_toggled_bounds_change_no_output(server: Server, serve: Serve, wide_model: Path, say: Say, rounds: int) -> None:
    """Tokens are those of an untouched engine, log probabilities nearly; all ranks take the same pages at one time."""
    with Toggler(server, SEED) as toggler:
        answers = answers_of(server, rounds)
    server.apply_cap(-1)
    server.apply_limit(-1)
    check_log(server)
    guarded = sum(int(line) for path in server.records_dir.glob("guarded-*") for line in path.read_text().split())
    moves = list(server.records().values())
    say(f"{toggler.published} published, {len(moves[0])} times pages moved, {guarded} rows guarded on all ranks")
    assert len(moves[0]) > 20
    assert all(each == moves[0] for each in moves)
    assert guarded > POOL // 2
    untouched = serve(wide_model, *server.options, environ={"KVCACHED_DISABLE": "1"})
    expected = answers_of(untouched, 1)
    assert len({answer.output_ids for answer in expected}) > len(expected) // 2
    for index, answer in enumerate(answers):
        other = expected[index % len(expected)]
        assert answer.output_ids == other.output_ids, index
        # What batch a request is in, and how much of it was cached, changes the last bits of a sum.
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-3), index
