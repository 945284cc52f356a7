"""A real vLLM server under load and four caps: what the kernel counts of its engine's memory, as JSON.

Run by ``scripts/pictures/vllm_memory.py`` in the engine's environment; writes one object to standard output.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_models import WIDE, write_config
from vllm_serving import BLOCK_TOKENS, descendants, engine_environment, prompt, serving, wait_until

from kvcached.control import set_kv_capacity_limit
from kvcached.memory.kernel_figures import anonymous_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_serving import Server

BLOCKS = 2048
"""Of 512 KiB: a pool of 1 GiB."""
SHARES = (0.5, 0.25, 0.75, 0.125)
HOLD_S = 8.0
EVERY_S = 0.2
CLIENTS = 4
CAP_WITHIN_S = FULL_WITHIN_S = 240.0


def load(server: Server, stop: threading.Event, number: int) -> None:
    """Send prompts that share nothing, one after the other, so that the pool fills as far as it may."""
    seed = number
    while not stop.is_set():
        server.complete(prompt(seed))
        seed += CLIENTS


def sample(server: Server, stop: threading.Event, began: float, samples: list[tuple[float, int, int]]) -> None:
    """Note seconds, what the kernel counts, and what the engine says is resident."""
    pids = descendants(server.process.pid)  # engine core and worker; the server itself holds no KV
    while not stop.is_set():
        kernel_bytes = sum(anonymous_bytes(pid) for pid in pids)
        samples.append((time.monotonic() - began, kernel_bytes, server.replica()["resident_bytes"]))
        stop.wait(EVERY_S)


def publish(server: Server, began: float) -> Iterator[tuple[float, float, int]]:
    """Publish the caps; yield when each was published and applied, and its tokens.

    Each is held for a while after the engine holds what it may.
    """
    time.sleep(HOLD_S)
    for share in SHARES:
        tokens = int(share * (BLOCKS - 1)) * BLOCK_TOKENS
        published_s = time.monotonic() - began
        result = set_kv_capacity_limit(
            tokens, instance_name=server.instance, ledger_dir=server.ledger_dir, wait=CAP_WITHIN_S
        )
        if not result.applied:
            message = f"the cap {tokens} was not applied within {CAP_WITHIN_S:.0f} s: {result}"
            raise SystemExit(message)
        yield published_s, time.monotonic() - began, tokens
        wait_until(lambda most=tokens: is_full(server, most), FULL_WITHIN_S, EVERY_S)
        time.sleep(HOLD_S)


def is_full(server: Server, most_tokens: int) -> bool:
    """Return whether nearly as much memory is resident as the cap allows."""
    state = server.replica()
    return bool(state["resident_bytes"] > 0.95 * most_tokens * state["token_bytes"])


def main() -> None:
    """Run the server, its clients and the caps."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = write_config(WIDE, directory / "model")
        environment = engine_environment(directory / "ledger", "chat")
        with serving(model, directory, environment, "--num-gpu-blocks-override", str(BLOCKS)) as server:
            server.complete(prompt(-1))
            stop, began = threading.Event(), time.monotonic()
            samples: list[tuple[float, int, int]] = []
            threads = [threading.Thread(target=load, args=(server, stop, number)) for number in range(CLIENTS)]
            threads.append(threading.Thread(target=sample, args=(server, stop, began, samples)))
            for thread in threads:
                thread.start()
            try:
                caps = list(publish(server, began))
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            state = server.replica()
    figures = {"token_bytes": state["token_bytes"], "pool_bytes": state["pool_bytes"], "caps": caps, "samples": samples}
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main()
