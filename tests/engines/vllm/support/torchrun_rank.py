"""One rank of an application that torchrun starts: each rank has an LLM object, and all of them serve the same prompts.

``torchrun_rank.py MODEL OPTIONS DIRECTORY`` (OPTIONS in JSON) waits for files ``DIRECTORY/ask-0``, ``ask-1`` and so on,
each with a seed in it, and answers each in ``answer-N-RANK``: the cached tokens of its prompt and the tokens of its
answer, in JSON. An empty file ends it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams


def ask(directory: Path, number: int) -> str:
    """Return what the next file says, once it is there."""
    path = directory / f"ask-{number}"
    while not path.exists():
        time.sleep(0.02)
    return path.read_text()


def main() -> None:
    """Answer until the end."""
    model, options, directory = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    engine = LLM(model=model, tensor_parallel_size=2, distributed_executor_backend="external_launcher", **options)
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    for number in itertools.count():
        seed = ask(directory, number)
        if not seed:
            return
        ids = random.Random(int(seed)).choices(range(3, 1024), k=512)
        (result,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        answer = [result.num_cached_tokens, list(result.outputs[0].token_ids)]
        draft = directory / f"draft-{os.environ['RANK']}"
        draft.write_text(json.dumps(answer))
        draft.rename(directory / f"answer-{number}-{os.environ['RANK']}")


if __name__ == "__main__":
    main()
