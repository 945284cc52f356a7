"""An application that measures itself: each number on standard input makes it serve a batch and print its speed.

The number is a seed; prompts of a positive one share prefixes, those of a negative one share nothing. Speed is tokens
per second. ``throughput.py MODEL OPTIONS`` prints ``ready`` first; an empty line ends it.
"""

from __future__ import annotations

import json
import random
import sys
import time

from vllm import LLM, SamplingParams

REQUESTS = 96
PROMPT_TOKENS = 320
SHARED_TOKENS = 256
OUTPUT_TOKENS = (16, 96)


def make_prompts(seed: int) -> list[dict[str, list[int]]]:
    """Return the batch of a seed."""
    draw = random.Random(seed)
    shared = SHARED_TOKENS if seed > 0 else 0
    prefixes = [draw.choices(range(3, 1024), k=shared) for _ in range(8)]
    return [
        {"prompt_token_ids": draw.choice(prefixes) + draw.choices(range(3, 1024), k=PROMPT_TOKENS - shared)}
        for _ in range(REQUESTS)
    ]


def main() -> None:
    """Serve standard input."""
    engine = LLM(model=sys.argv[1], load_format="dummy", max_num_seqs=32, **json.loads(sys.argv[2]))
    draw = random.Random(1)  # answers of different lengths, so that requests end at different steps
    lengths = [draw.randint(*OUTPUT_TOKENS) for _ in range(REQUESTS)]
    samplings = [
        SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, detokenize=False) for length in lengths
    ]
    print("ready", flush=True)
    for line in sys.stdin:
        if not line.strip():
            return
        prompts = make_prompts(int(line))
        began = time.perf_counter()
        engine.generate(prompts, samplings, use_tqdm=False)
        print(round(sum(lengths) / (time.perf_counter() - began)), flush=True)


if __name__ == "__main__":
    main()
