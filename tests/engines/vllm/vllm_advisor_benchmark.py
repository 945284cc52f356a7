"""What the advisor costs a real vLLM: tokens per second with it divided by those without.

    .venvs/vllm/bin/python tests/engines/vllm/vllm_advisor_benchmark.py

One engine in this process serves the same kind of round again and again, with and without the advisor in turns, so
that a busy machine slows both alike. Seconds are those of the CPU. A tiny model makes the scheduler's share as large as
it gets.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from vllm_models import CONTEXT, PLAIN, VOCABULARY, write_config

ROUNDS = 200
PROMPTS = 32
HEAD_TOKENS = 512
TAIL_TOKENS = 256
ANSWER_TOKENS = 24
BLOCK_TOKENS = 32
AIM = 0.99

_FOLLOWED = ("schedule", "_free_request_blocks")


def main() -> int:
    """Measure and print; the exit code is 0 if the aim is met."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            KVCACHED_LEDGER_DIR=f"{folder}/ledger",
            KVCACHED_INSTANCE_NAME="bench-advisor",
            KVCACHED_MAX_CACHED_TOKENS="20000",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS="1",
        )
        return _measure(write_config(PLAIN, Path(folder) / "model"))


def _measure(model: Path) -> int:
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - after the environment

    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=4096,
        max_model_len=CONTEXT,
        distributed_executor_backend="uni",
    )
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    core = llm.llm_engine.engine_core.engine_core
    switch = Switch(core)
    rng = random.Random(3)
    head = rng.choices(range(3, VOCABULARY), k=HEAD_TOKENS)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * ROUNDS + 2):
        with_advisor = number % 2 == 0
        switch.set(on=with_advisor)
        prompts = [
            {"prompt_token_ids": head + rng.choices(range(3, VOCABULARY), k=TAIL_TOKENS)} for _ in range(PROMPTS)
        ]
        begin = time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        if number >= 2:
            seconds[with_advisor].append(time.process_time() - begin)
    tokens = PROMPTS * (HEAD_TOKENS + TAIL_TOKENS + ANSWER_TOKENS)
    ratios = [without / with_it for with_it, without in zip(seconds[True], seconds[False], strict=True)]
    ratio = statistics.median(seconds[False]) / statistics.median(seconds[True])
    print(f"tokens per CPU second with the advisor: {tokens / statistics.median(seconds[True]):,.0f}")
    print(f"without: {tokens / statistics.median(seconds[False]):,.0f}")
    print(f"ratio of pairs: median {statistics.median(ratios):.4f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"{'ok  ' if ratio >= AIM else 'FAIL'} with ÷ without: {ratio:.4f} (≥ {AIM})")
    return 0 if ratio >= AIM else 1


class Switch:
    """Takes the advisor out of a running engine core and puts it back."""

    def __init__(self, core: Any) -> None:  # noqa: ANN401 - vLLM's EngineCore
        self._scheduler = core.scheduler
        self._governor = core.__dict__["_kvcached_governor"]._governor
        self._advisor = self._governor._advisor
        assert self._advisor is not None
        self._methods = {name: self._scheduler.__dict__[name] for name in _FOLLOWED}

    def set(self, *, on: bool) -> None:
        """Let the advisor watch, or not."""
        self._governor._advisor = self._advisor if on else None
        for name, method in self._methods.items():
            if on:
                self._scheduler.__dict__[name] = method
            else:
                self._scheduler.__dict__.pop(name, None)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
