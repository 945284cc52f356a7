"""Reads request traces in the Mooncake format: one JSON object a line, one hash id per block of 512 prompt tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvcached.rig.request import Arrival, Request

if TYPE_CHECKING:
    from pathlib import Path

TRACE_BLOCK_TOKENS = 512
"""How many tokens one hash id of the format stands for."""

_ANSWER_SALT = 11


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line and reason."""


def read_trace(path: Path) -> list[Arrival]:
    """Return the requests of the file at ``path`` in its order. Raises :class:`TraceError`."""
    arrivals: list[Arrival] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    arrivals.append(_read_line(f"{path}, line {number}", line, len(arrivals)))
    except (OSError, UnicodeDecodeError) as error:
        message = f"trace {path} cannot be read: {error}"
        raise TraceError(message) from error
    return arrivals


def _read_line(place: str, line: str, index: int) -> Arrival:
    try:
        entry = json.loads(line)
        at_ms = float(entry["timestamp"])
        prompt_tokens = int(entry["input_length"])
        output_tokens = int(entry["output_length"])
        hash_ids = [int(one) for one in entry["hash_ids"]]
    except (KeyError, TypeError, ValueError) as error:
        message = f"{place}: not a request in the Mooncake format ({type(error).__name__}: {error})"
        raise TraceError(message) from error
    if prompt_tokens < 1 or output_tokens < 0 or at_ms < 0:
        message = f"{place}: lengths and time stamp cannot be negative, and a prompt has at least one token"
        raise TraceError(message)
    if len(hash_ids) != -(-prompt_tokens // TRACE_BLOCK_TOKENS):
        message = f"{place}: {len(hash_ids)} hash ids do not cover {prompt_tokens} tokens in blocks of 512"
        raise TraceError(message)
    content = _content(index, prompt_tokens, prompt_tokens + output_tokens, hash_ids)
    return Arrival(at_ms, Request(index, prompt_tokens, output_tokens, content))


def _content(index: int, prompt_tokens: int, total_tokens: int, hash_ids: list[int]) -> tuple[int, ...]:
    """Name the full blocks: those of the prompt by their hash ids, those the answer fills by a number of their own.

    The trace does not tell what was answered, so the block in which prompt and answer meet matches no other.
    """
    prompt_blocks = prompt_tokens // TRACE_BLOCK_TOKENS
    total_blocks = total_tokens // TRACE_BLOCK_TOKENS
    answered = [hash((_ANSWER_SALT, index, position)) for position in range(prompt_blocks, total_blocks)]
    return (*hash_ids[:prompt_blocks], *answered)
