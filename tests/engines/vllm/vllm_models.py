"""Tiny models that the tests write themselves: nothing is downloaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 1024
CONTEXT = 2048

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}

PLAIN = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
"""One KV-cache group."""

WIDE = {
    **PLAIN,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""KV rows as wide as those of large models: a block of 32 tokens is 128 KiB in each layer, and 512 KiB in all."""

HYBRID = {
    **_COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
"""Two KV-cache groups, sliding window and full attention, in one pool."""


def write_config(config: dict[str, Any], directory: Path) -> Path:
    """Write a model without weights, for ``load_format="dummy"``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_weights(config: dict[str, Any], directory: Path, seed: int = 7) -> Path:
    """Write a model with weights so far apart that different prompts get different greedy outputs."""
    import torch  # noqa: PLC0415 - slow, and only a few tests need it
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    write_config(config, directory)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory
