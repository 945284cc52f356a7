"""Recorded traffic as a curve: what a trace says of the hit rate over the limit, without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.advisor.replay import replay
from kvcached.workload.trace import TRACE_BLOCK_TOKENS, TraceError, read_trace

if TYPE_CHECKING:
    from kvcached.advisor.reading import Curve


@dataclass(frozen=True)
class RecordedTraffic:
    """A trace: its file's name, the curve, how many requests and prompt tokens, and over how many seconds."""

    name: str
    curve: Curve
    requests: int
    prompt_tokens: int
    seconds: float
    block_tokens: int


def read_recorded(path: str, block_tokens: int | None) -> RecordedTraffic:
    """Read a trace and replay it. Raises :class:`kvcached.workload.trace.TraceError`, also for one without requests."""
    size = block_tokens or TRACE_BLOCK_TOKENS
    arrivals = read_trace(Path(path), size)
    if not arrivals:
        message = f"trace {path} holds no requests"
        raise TraceError(message)
    requests = [arrival.request for arrival in arrivals]
    return RecordedTraffic(
        Path(path).name.split(".")[0],
        replay(requests, size),
        len(requests),
        sum(request.prompt_tokens for request in requests),
        max(arrival.at_ms for arrival in arrivals) / 1000,
        size,
    )
