"""An application that measures itself: each line on standard input makes it serve a batch and print tokens per second.

``throughput.py MODEL OPTIONS`` prints ``ready`` first; an empty line ends it.
"""

from __future__ import annotations

import json
import random
import sys
import time

from vllm import LLM, SamplingParams

REQUESTS = 64
OUTPUT_TOKENS = 64


def main() -> None:
    """Serve standard input."""
    engine = LLM(model=sys.argv[1], load_format="dummy", max_num_seqs=32, **json.loads(sys.argv[2]))
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    print("ready", flush=True)
    for line in sys.stdin:
        if not line.strip():
            return
        draw = random.Random(int(line))
        prefixes = [draw.choices(range(3, 1024), k=256) for _ in range(8)]
        prompts = [
            {"prompt_token_ids": draw.choice(prefixes) + draw.choices(range(3, 1024), k=64)} for _ in range(REQUESTS)
        ]
        began = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        print(round(REQUESTS * OUTPUT_TOKENS / took), flush=True)


if __name__ == "__main__":
    main()
