"""Traces of made-up chats, in the format that recorded traffic has."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 512


def requests(seed: int, count: int, chats: int) -> list[dict[str, Any]]:
    """Return growing chats over common heads, as lines of a trace; nothing is answered."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    open_chats = [[chat % 5 * 10_000 + block for block in range(4)] for chat in range(chats)]
    lines = []
    fresh = 10**6
    for number in range(count):
        chat = open_chats[rng.randrange(chats)]
        for _ in range(rng.randint(1, 4)):
            fresh += 1
            chat.append(fresh)
        if len(chat) > 60:
            del chat[4:]
        lines.append(
            {"timestamp": number * 100, "input_length": len(chat) * BLOCK, "output_length": 0, "hash_ids": list(chat)}
        )
    return lines


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
