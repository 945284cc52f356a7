"""A seeded load of growing chats: shared system prompts, several turns each, every turn resending all before it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvcached.workload.request import Arrival, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT_BLOCK_TOKENS = 16
"""The block size that generated loads are made for."""

LONGEST_TOKENS = 16384
"""How long a chat grows before it ends, where the cache is large enough."""

_SYSTEM_PROMPTS = (640, 1200, 2048, 3072)
_OPEN_CHATS = 96
_ENDS = 0.15
_MEAN_GAP_MS = 100.0
_MEAN_QUESTION = 180.0
_MEAN_ANSWER = 220.0
_SYSTEM_SALT = 7


class _Chat:
    """One conversation: what was said so far, and the names of the blocks that it fills."""

    __slots__ = ("content", "number", "said")

    def __init__(self, number: int, system_tokens: int) -> None:
        self.number = number
        self.said = system_tokens
        blocks = range(system_tokens // CHAT_BLOCK_TOKENS)
        self.content = [hash((_SYSTEM_SALT, system_tokens, position)) for position in blocks]

    def say(self, tokens: int) -> None:
        """Go on by ``tokens`` tokens that no other chat has."""
        self.said += tokens
        blocks = range(len(self.content), self.said // CHAT_BLOCK_TOKENS)
        self.content += [hash((self.number, position)) for position in blocks]


def longest_request(longest_tokens: int) -> int:
    """Return how many tokens prompt and answer of a generated request have at most."""
    return longest_tokens + longest_tokens // 4


def generate_chats(requests: int, seed: int, longest_tokens: int = LONGEST_TOKENS) -> Iterator[Arrival]:
    """Yield ``requests`` arrivals, the same for the same arguments in every process and on every machine.

    No request is longer than 1.25 times ``longest_tokens``.
    """
    systems = [tokens for tokens in _SYSTEM_PROMPTS if tokens <= longest_tokens // 2] or [longest_tokens // 4]
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    chats: list[_Chat] = []
    opened = 0
    at_ms = 0.0
    for index in range(requests):
        while len(chats) < _OPEN_CHATS:
            chats.append(_Chat(opened, rng.choice(systems)))
            opened += 1
        place = rng.randrange(len(chats))
        chat = chats[place]
        yield Arrival(at_ms, _next_turn(chat, index, rng, longest_tokens // 8))
        at_ms += rng.expovariate(1 / _MEAN_GAP_MS)
        if chat.said > longest_tokens or rng.random() < _ENDS:
            del chats[place]


def _next_turn(chat: _Chat, index: int, rng: random.Random, longest: int) -> Request:
    """Ask the next question of ``chat``; the next turn's prompt begins with this prompt and this answer."""
    chat.say(max(1, min(longest, round(rng.expovariate(1 / _MEAN_QUESTION)))))
    prompt_tokens = chat.said
    chat.say(max(1, min(longest, round(rng.expovariate(1 / _MEAN_ANSWER)))))
    return Request(index, prompt_tokens, chat.said - prompt_tokens, tuple(chat.content))
