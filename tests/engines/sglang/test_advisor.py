"""The advisor in real servers: what the run at one limit predicts for others is what runs at those measure."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
from sglang_server import Server, prompt, wait_until

from kvcached.advisor.curve import value_at

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Say, Serve

pytestmark = pytest.mark.long

LIMITS = (0, 1200, 3500, 8000)
WITHIN = 0.03
CLIENTS = 8
TURNS = 40
LONGEST = 1100
HEADS = (128, 320, 640)
BURST = 22
OPTIONS = (
    *("--tp-size", "2", "--max-total-tokens", "16384", "--chunked-prefill-size", "512"),
    *("--schedule-conservativeness", "0.1"),
)


class Client(threading.Thread):
    """Holds several chats behind shared heads, one turn at a time, and hangs up on some."""

    def __init__(self, server: Server, number: int) -> None:
        super().__init__(name=f"client {number}")
        self.server = server
        self.random = random.Random(number)
        self.chats = [self._new() for _ in range(4)]
        self.error: BaseException | None = None

    def run(self) -> None:
        """Ask all turns."""
        try:
            for turn in range(TURNS):
                self._ask(turn)
        except BaseException as error:  # noqa: BLE001 - told to the test, which fails by it
            self.error = error

    def _new(self) -> list[int]:
        head = self.random.randrange(len(HEADS))
        return prompt(7000 + head, HEADS[head])

    def _ask(self, turn: int) -> None:
        place = self.random.randrange(len(self.chats))
        if len(self.chats[place]) > LONGEST or self.random.random() < 0.1:
            self.chats[place] = self._new()
        self.chats[place] += [self.random.randrange(4, 1000) for _ in range(self.random.randint(10, 90))]
        if self.random.random() < 0.06:
            self._hang_up(f"{self.name}-{turn}", self.chats[place])
            return
        self.chats[place] += self.server.generate(self.chats[place], self.random.randint(4, 12)).output_ids

    def _hang_up(self, name: str, ids: list[int]) -> None:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.server.generate, ids, 300, rid=name)
            while not asked.done():
                time.sleep(0.3)
                self.server.post("/abort_request", {"rid": name})
            asked.exception()


def serve_workload(server: Server) -> None:
    """Let all clients ask, with a burst in the middle that does not fit into the pool, and a flush at first."""
    server.generate(prompt(1, 600))
    server.post("/flush_cache", {})
    clients = [Client(server, number) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(1)
    # Answers of unknown length: SGLang admits more than will fit, and retracts some.
    server.generate_all([prompt(9000 + number, 500) for number in range(BURST)], tokens=250, ignore_eos=False)
    for client in clients:
        client.join()
    assert not [client.error for client in clients if client.error is not None]


def advice(server: Server) -> dict[str, Any]:
    """Return what ``advise --json`` says of the only replica."""
    (replica,) = json.loads(server.control("advise", "--json", "--window", "long").out)["replicas"]
    return dict(replica)


@pytest.fixture(scope="module")
def runs(serve_module: Serve, plain_model: Path) -> dict[int, dict[str, Any]]:
    """Serve the workload at each limit, by a server of its own."""
    found = {}
    for limit in LIMITS:
        server = serve_module(plain_model, *OPTIONS, environ={"KVCACHED_MAX_CACHED_TOKENS": str(limit)})
        serve_workload(server)
        wait_until(lambda server=server: server.status()[0]["active_tokens"] == 0, 60, "idle")
        time.sleep(2.5)
        found[limit] = advice(server)
        found[limit]["retractions"] = server.log().count("Retract requests")
        print(limit, {key: found[limit][key] for key in found[limit] if key != "curve"}, flush=True)
        server.stop()
    return found


def test_each_run_predicts_the_others(runs: dict[int, dict[str, Any]], say: Say) -> None:
    """Each run's curve gives the other runs' measured hit rates within 0.03."""
    errors = {}
    for one, other in permutations(LIMITS, 2):
        curve = runs[one]["curve"]
        limits = [point["limit_tokens"] for point in curve[1:]]
        predicted = value_at(limits, [point["hit_rate"] for point in curve], other)
        errors[one, other] = abs(predicted - runs[other]["measured_hit_rate"])
    say(f"measured {[round(runs[limit]['measured_hit_rate'], 4) for limit in LIMITS]} at {LIMITS}")
    say(f"largest error {max(errors.values()):.4f}, mean {sum(errors.values()) / len(errors):.4f}")
    assert max(errors.values()) <= WITHIN, errors


def test_every_request_is_counted_once(runs: dict[int, dict[str, Any]]) -> None:
    """Chunked, aborted and retracted requests count once each; one that was aborted while it waited, not at all."""
    asked = CLIENTS * TURNS + BURST + 1
    for found in runs.values():
        assert found["retractions"] > 0, "the burst was too small to show it"
        assert asked * 0.98 <= found["requests"] <= asked + 2, found["requests"]


def test_advisor_works_without_trouble(runs: dict[int, dict[str, Any]]) -> None:
    """No run's advisor has failed, and model and engine agree at the limit in force."""
    for found in runs.values():
        assert not found["refused"] or "failed" not in found["refused"]
        assert abs(found["model_error"]) <= WITHIN
