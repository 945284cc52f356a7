"""A tiny OPT model: the one family that SGLang serves on a CPU without special kernels."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 128,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "do_layer_norm_before": True,
    "word_embed_proj_dim": 128,
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "bfloat16",
}
WIDE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "word_embed_proj_dim": 512}
"""In float32 a token takes 2 KiB in each tensor of keys or values: as with 8 heads of 128 in bfloat16."""
WEIGHT_SEED = 20
WEIGHT_DEVIATION = 0.15


def write_model(folder: Path, *, weights: bool, wide: bool = False) -> Path:
    """Write the model's config into ``folder``, and its random weights if asked; returns the folder.

    A ``wide`` model has as much KV per token and layer as a large one.
    """
    config = {**CONFIG, **WIDE} if wide else CONFIG
    if weights:
        _write_weights(folder, config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write weights large enough for outputs that differ from prompt to prompt, the same at every call."""
    import torch  # noqa: PLC0415 - takes seconds, and most tests do without
    from transformers import OPTConfig, OPTForCausalLM  # noqa: PLC0415

    generator = torch.Generator().manual_seed(WEIGHT_SEED)
    model = OPTForCausalLM(OPTConfig(**{key: config[key] for key in config if key != "architectures"}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, WEIGHT_DEVIATION, generator=generator)
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
