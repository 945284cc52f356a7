"""One request as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the answer it will get.

    ``content`` holds one number per *full* block of prompt and answer together; equal numbers after equal ones stand
    for equal text. What is left over of the last block is never cached. Picklable: it rides the broadcast.
    """

    index: int
    prompt_tokens: int
    output_tokens: int
    content: tuple[int, ...]

    @property
    def total_tokens(self) -> int:
        """Prompt and answer together, in tokens."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it arrives, in milliseconds from the start of the workload."""

    at_ms: float
    request: Request
