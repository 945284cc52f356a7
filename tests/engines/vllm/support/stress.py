"""Send requests with shared prefixes through an engine with little memory, once in peace and once under toggling.

``stress.py MODEL BLOCKS OUTPUTS`` prints ``toggle`` before the second round and ``done`` after it, and writes the
greedy outputs of both rounds to OUTPUTS.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams

REQUESTS = 150
PREFIXES = 8
SEED = 20


def make_prompts() -> list[list[int]]:
    """Return prompts of 70 to 300 tokens over a few prefixes of their own."""
    draw = random.Random(SEED)
    prefixes = [draw.choices(range(3, 1024), k=draw.choice([64, 128, 200])) for _ in range(PREFIXES)]
    return [draw.choice(prefixes) + draw.choices(range(3, 1024), k=draw.randrange(6, 100)) for _ in range(REQUESTS)]


def main() -> None:
    """Run both rounds."""
    model, blocks, outputs = sys.argv[1:]
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        block_size=32,
        num_gpu_blocks_override=int(blocks),
        enable_prefix_caching=True,
        max_model_len=2048,
        max_num_seqs=24,
    )
    print(f"seed {SEED}", flush=True)
    prompts = [{"prompt_token_ids": each} for each in make_prompts()]
    sampling = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True, detokenize=False)
    rounds = []
    for word in ("peace", "toggle"):
        engine.reset_prefix_cache()
        print(word, flush=True)
        results = engine.generate(prompts, sampling, use_tqdm=False)
        rounds.append([list(result.outputs[0].token_ids) for result in results])
    Path(outputs).write_text(json.dumps(rounds))
    print("done", flush=True)
    time.sleep(2.0)  # the pool checker writes what it saw when the engine core idles


if __name__ == "__main__":
    main()
