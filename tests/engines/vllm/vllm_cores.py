"""Real engine cores in the test's own process: built in a third of a second, once the first one is."""

# ruff: noqa: ANN401 - vLLM's objects have no types here

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm_serving import ENGINE_OPTIONS, prompt

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = 128

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or this process, and what it starts later, would be bound
    "VLLM_NO_USAGE_STATS": "1",
}


def make_config(model: Path, **options: Any) -> Any:
    """Return a configuration of vLLM's, for one engine: vLLM notes its layers there."""
    os.environ.update(ENVIRONMENT)
    chosen = ENGINE_OPTIONS | {"num_gpu_blocks_override": BLOCKS, "load_format": "dummy"} | options
    return EngineArgs(model=str(model), distributed_executor_backend="uni", **chosen).create_engine_config()


def make_core(config: Any) -> Any:
    """Return an engine core as an LLM object has it inside itself, with everything but the LLM object around it."""
    return EngineCore(config, UniProcExecutor, log_stats=True)


def add(core: Any, name: str, token_ids: list[int], max_tokens: int = 4) -> None:
    """Send a prompt."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__[:9])
    fields |= {"request_id": name, "prompt_token_ids": token_ids, "sampling_params": sampling, "arrival_time": 0.0}
    request, wave = core.preprocess_add_request(EngineCoreRequest(**fields))
    core.add_request(request, wave)


def step(core: Any) -> Any:
    """Do what an LLM object does for a step; return the outputs."""
    outputs, executed = core.step_fn()
    core.post_step(executed)
    return outputs


def serve(core: Any, seed: int, max_tokens: int = 4) -> int:
    """Serve the prompt of ``seed`` to its end; return how many of its tokens the prefix cache had."""
    add(core, f"request-{seed}", prompt(seed), max_tokens)
    hits = 0
    while core.scheduler.has_requests():
        for outputs in step(core).values():
            for output in outputs.outputs:
                stats = getattr(output, "prefill_stats", None)
                hits = max(hits, stats.num_cached_tokens if stats else getattr(output, "num_cached_tokens", 0))
    return hits


def pool_of(core: Any) -> Any:
    """Return the engine core's block pool."""
    return core.scheduler.kv_cache_manager.block_pool


def idle_blocks(core: Any) -> int:
    """Return how many cached blocks nobody uses, by a walk."""
    return sum(block.block_hash is not None for block in pool_of(core).free_block_queue.get_all_free_blocks())


def own_attributes(core: Any) -> list[dict[str, Any]]:
    """Return the attributes of the objects on which the plugin replaces methods."""
    manager = core.scheduler.kv_cache_manager
    objects = (core, core.scheduler, manager, pool_of(core), pool_of(core).free_block_queue)
    return [{name: value for name, value in vars(each).items() if callable(value)} for each in objects]
