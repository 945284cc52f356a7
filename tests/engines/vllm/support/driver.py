"""An application with an LLM object, told by lines on standard input what to do: ``SEED`` prompts, an empty line ends.

``driver.py MODEL OPTIONS`` (OPTIONS in JSON) prints ``ready``, then for each seed the cached tokens of its prompt.
"""

from __future__ import annotations

import json
import random
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    """Serve standard input."""
    model, options = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(model=model, load_format="dummy", **options)
    sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False)
    print("ready", flush=True)
    for line in sys.stdin:
        if not line.strip():
            return
        ids = random.Random(int(line)).choices(range(3, 1024), k=512)
        (result,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        print(result.num_cached_tokens, flush=True)


if __name__ == "__main__":
    main()
