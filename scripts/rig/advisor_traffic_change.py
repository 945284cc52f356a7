"""Lets the traffic of a running engine change, and looks on how the advisor's two windows take it.

First chats, most of whose prompts were asked before; then documents that are read once, behind one shared head. Nothing
but the head can be hit in the second half, so its true rate is known.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rig_process import Engine

from kvcached.advisor.reading import LONG, NOW
from kvcached.control.queries.recommendation import Goal, advise_instance

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTANCE = "advisor-change"
BLOCK_TOKENS = 512
CHATS = 3000
DOCUMENTS = 3600
CHAT_BLOCKS = 8
DOCUMENT_BLOCKS = 16
SHARED_BLOCKS = 2
DOCUMENT_RATE = SHARED_BLOCKS / DOCUMENT_BLOCKS
FOLLOWS_WITHIN = 0.05
"""How far from the new traffic's rate the window *now* may end."""
_LIMIT = 500_000
_PATIENCE_S = 300.0


def requests(seed: int) -> Iterator[dict[str, object]]:
    """Yield the requests in the Mooncake format."""
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    fresh = 10_000
    for index in range(CHATS + DOCUMENTS):
        if index < CHATS:
            chat = rng.randrange(60)
            blocks = [chat * CHAT_BLOCKS + place for place in range(CHAT_BLOCKS)]
        else:
            blocks = [*range(9000, 9000 + SHARED_BLOCKS), *range(fresh, fresh + DOCUMENT_BLOCKS - SHARED_BLOCKS)]
            fresh += DOCUMENT_BLOCKS
        length = len(blocks) * BLOCK_TOKENS
        yield {"timestamp": index, "input_length": length, "output_length": 40, "hash_ids": blocks}


def main() -> int:
    """Run it; the exit code is 0 if *now* follows and *long* is told to differ."""
    environment = {"KVCACHED_MAX_CACHED_TOKENS": str(_LIMIT)}
    with tempfile.TemporaryDirectory(prefix="kvcached-") as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_text("".join(json.dumps(one) + "\n" for one in requests(1)), encoding="utf-8")
        arguments = ("--trace", str(trace), "--linger", "3600", "--speed", "0.4")
        with Engine(*arguments, instance=INSTANCE, environment=environment) as engine:
            return _watch(str(engine.folder / "ledger"))


def _watch(ledger_dir: str) -> int:
    """Print both windows until all requests are served."""
    print(f"{'requests':>9} {'now':>6} {'long':>6}  told")
    seen, deadline = 0, time.monotonic() + _PATIENCE_S
    told_at = None
    now = long = 0.0
    while seen < CHATS + DOCUMENTS and time.monotonic() < deadline:
        time.sleep(0.5)
        (advice,) = advise_instance(INSTANCE, ledger_dir, Goal(share=0.9))
        if advice.requests == seen or advice.curve is None:
            continue
        seen = advice.requests
        now, long = (_attainable(ledger_dir, window) for window in (NOW, LONG))
        told = any("traffic is changing" in warning for warning in advice.warnings)
        if told and told_at is None and seen > CHATS:
            told_at = seen - CHATS
        print(f"{seen:>9,} {now:>6.3f} {long:>6.3f}  {'changing' if told else 'steady'}", flush=True)
    checks = {
        f"all {CHATS + DOCUMENTS:,} requests seen": seen == CHATS + DOCUMENTS,
        f"the window now ends at {now:.3f}, the new traffic's rate is {DOCUMENT_RATE:.3f}": (
            abs(now - DOCUMENT_RATE) <= FOLLOWS_WITHIN
        ),
        f"the window long stands at {long:.3f}, and that they differ was told {told_at} requests after the change": (
            told_at is not None and abs(long - now) > FOLLOWS_WITHIN
        ),
    }
    for text, held in checks.items():
        print(f"{'ok  ' if held else 'FAIL'} {text}")
    return 0 if all(checks.values()) else 1


def _attainable(ledger_dir: str, window: str) -> float:
    (advice,) = advise_instance(INSTANCE, ledger_dir, Goal(share=0.9), window)
    return advice.attainable or 0.0


if __name__ == "__main__":
    sys.exit(main())
