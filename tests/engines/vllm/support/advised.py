"""Serves one seeded workload and then waits to be ended: ``advised.py MODEL OPTIONS`` (OPTIONS in JSON).

Chats behind three shared heads, each turn with all that was said before; some are hung up on; now and then a burst that
does not fit into the pool, so that requests are preempted; a prompt without look-up; in the beginning one reset of the
cache. Prints ``ready`` when all is served.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass, field

from vllm import LLM, SamplingParams

VOCABULARY = 1024
CHATS = 40
LONGEST = 1200
AT_ONCE = 10
TURNS = 260
BURST_EVERY = 120
BURST = 28


@dataclass
class Chat:
    """One conversation."""

    said: list[int]
    busy: bool = False


@dataclass
class Sent:
    """A request in flight."""

    chat: Chat | None
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    hang_up_after: int | None = None


class Client:
    """Keeps the engine busy, one turn of each chat at a time."""

    def __init__(self, engine: object) -> None:
        self._engine = engine
        self._random = random.Random(11)
        self._heads = [self._tokens(length) for length in (128, 320, 640)]
        self._chats = [self._new_chat() for _ in range(CHATS)]
        self._sent: dict[str, Sent] = {}
        self._count = 0

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(3, VOCABULARY), k=count)

    def _new_chat(self) -> Chat:
        return Chat(list(self._random.choice(self._heads)))

    def run(self) -> None:
        """Serve all turns."""
        turns = 0
        while turns < TURNS or self._sent:
            while turns < TURNS and len(self._sent) < AT_ONCE:
                self._ask()
                turns += 1
                if turns % BURST_EVERY == 0:
                    for _ in range(BURST):
                        self._send(None, self._tokens(400), 600)
            self._step()

    def _ask(self) -> None:
        idle = [chat for chat in self._chats if not chat.busy]
        chat = self._random.choice(idle)
        if len(chat.said) > LONGEST or self._random.random() < 0.1:
            chat.said = self._new_chat().said
        chat.said = chat.said + self._tokens(self._random.randint(10, 90))
        chat.busy = True
        hang_up = self._random.randint(1, 6) if self._random.random() < 0.08 else None
        self._send(chat, list(chat.said), self._random.randint(4, 14), hang_up)

    def _send(self, chat: Chat | None, prompt: list[int], answer: int, hang_up: int | None = None) -> None:
        self._count += 1
        logprobs = 0 if self._count % 60 == 0 else None  # vLLM looks nothing up for these
        sampling = SamplingParams(
            max_tokens=answer, temperature=0, detokenize=False, ignore_eos=True, prompt_logprobs=logprobs
        )
        self._sent[str(self._count)] = Sent(chat, prompt, hang_up_after=hang_up)
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, sampling)

    def _step(self) -> None:
        for output in self._engine.step():
            sent = self._sent.get(output.request_id)
            if sent is None:
                continue
            sent.answer = list(output.outputs[0].token_ids)
            hung_up = sent.hang_up_after is not None and len(sent.answer) >= sent.hang_up_after
            if hung_up and not output.finished:
                self._engine.abort_request([output.request_id])
            if hung_up or output.finished:
                del self._sent[output.request_id]
                if sent.chat is not None:
                    sent.chat.said = sent.prompt + sent.answer
                    sent.chat.busy = False


def main() -> None:
    """Serve, tell, wait."""
    model, options = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(model=model, load_format="dummy", **options)
    sampling = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
    llm.generate([{"prompt_token_ids": list(range(3, 300))}], sampling, use_tqdm=False)
    llm.reset_prefix_cache()
    Client(llm.llm_engine).run()
    preemptions = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    print(f"preemptions {sum(preemptions):.0f}", file=sys.stderr, flush=True)
    print("ready", flush=True)
    sys.stdin.readline()
    os._exit(0)  # what is to be seen was seen; tearing an engine down takes its time


if __name__ == "__main__":
    main()
