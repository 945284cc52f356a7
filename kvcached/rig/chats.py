"""A seeded load of growing chats: shared system prompts, several turns each, every turn resending all before it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvcached.rig.request import Arrival, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT_BLOCK_TOKENS = 16
"""The block size that generated loads are made for."""

_SYSTEM_PROMPTS = (640, 1200, 2048, 3072)
_OPEN_CHATS = 96
_ENDS = 0.15
_MEAN_GAP_MS = 100.0
_MEAN_QUESTION = 180.0
_MEAN_ANSWER = 220.0
_LONGEST = 16384
_SYSTEM_SALT = 7


class _Chat:
    """One conversation: which system prompt it began with, and how many tokens were said so far."""

    __slots__ = ("number", "said", "system")

    def __init__(self, number: int, system: int) -> None:
        self.number = number
        self.system = system
        self.said = _SYSTEM_PROMPTS[system]

    def content(self, blocks: int) -> tuple[int, ...]:
        """Name the first ``blocks`` blocks; those inside the system prompt are the same for all chats that share it."""
        shared = min(blocks, _SYSTEM_PROMPTS[self.system] // CHAT_BLOCK_TOKENS)
        prompt = [hash((_SYSTEM_SALT, self.system, position)) for position in range(shared)]
        return (*prompt, *(hash((self.number, position)) for position in range(shared, blocks)))


def generate_chats(requests: int, seed: int) -> list[Arrival]:
    """Return ``requests`` arrivals, the same for the same ``seed`` in every process and on every machine."""
    return list(_arrivals(requests, random.Random(seed)))  # noqa: S311 - a load, not a secret


def _arrivals(requests: int, rng: random.Random) -> Iterator[Arrival]:
    chats: list[_Chat] = []
    opened = 0
    at_ms = 0.0
    for index in range(requests):
        while len(chats) < _OPEN_CHATS:
            chats.append(_Chat(opened, rng.randrange(len(_SYSTEM_PROMPTS))))
            opened += 1
        place = rng.randrange(len(chats))
        chat = chats[place]
        yield Arrival(at_ms, _next_turn(chat, index, rng))
        at_ms += rng.expovariate(1 / _MEAN_GAP_MS)
        if chat.said > _LONGEST or rng.random() < _ENDS:
            del chats[place]


def _next_turn(chat: _Chat, index: int, rng: random.Random) -> Request:
    """Ask the next question of ``chat``; prompt and answer are the beginning of its turn after that."""
    prompt_tokens = chat.said + 1 + int(rng.expovariate(1 / _MEAN_QUESTION))
    answer_tokens = 1 + int(rng.expovariate(1 / _MEAN_ANSWER))
    chat.said = prompt_tokens + answer_tokens
    return Request(index, prompt_tokens, answer_tokens, chat.content(chat.said // CHAT_BLOCK_TOKENS))
