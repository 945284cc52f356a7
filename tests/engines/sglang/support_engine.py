"""An engine inside a program: serves a prompt twice under a limit that the program itself changes."""

from __future__ import annotations

import json
import sys

import sglang

from kvcached.control import set_prefix_cache_retention_limit


def start(model: str) -> sglang.Engine:
    """Return an engine on the CPU, with dummy weights."""
    return sglang.Engine(
        model_path=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        dtype="bfloat16",
        context_length=2048,
        max_total_tokens=8192,
        mem_fraction_static=0.3,
        grammar_backend="none",
    )


def main(model: str, instance: str) -> None:
    """Print how many tokens were cached before and after limit 0."""
    engine = start(model)
    ids = list(range(10, 210))
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    found = [engine.generate(input_ids=ids, sampling_params=sampling)["meta_info"]["cached_tokens"] for _ in range(2)]
    result = set_prefix_cache_retention_limit(0, instance_name=instance, wait=30)
    found.append(engine.generate(input_ids=ids, sampling_params=sampling)["meta_info"]["cached_tokens"])
    engine.shutdown()
    sys.stdout.write(json.dumps({"applied": result.applied, "cached": found}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
