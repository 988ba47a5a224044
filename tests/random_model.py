"""Configs for random weights in Escha's form: small ones, that a CPU computes."""

from __future__ import annotations

import json
from pathlib import Path

ESCHA = {
    "model_type": "qwen3_5_text",
    "vocab_size": 17000,  # the bundled tokenizer's ids, and 616 made-up words
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "eos_token_id": 1,
    "quantization_config": {"quant_method": "escha"},
}


def write_config(directory: Path, **changes: object) -> Path:
    """A directory that holds nothing but this config."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**ESCHA, **changes}))
    return directory
