"""Shapes of well-known models by name, so that `kakera plan` works before anything is downloaded. No torch.

Source of the numbers: the public config.json of each model; Escha's quantisation is that of its own repository.
"""

from __future__ import annotations

from typing import Any

_FAMILY: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
    "eos_token_id": [248046, 248044],
}
_27B: dict[str, Any] = {
    **_FAMILY,
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "intermediate_size": 17408,
    "linear_num_value_heads": 48,
}
_9B: dict[str, Any] = {
    **_FAMILY,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 12288,
    "linear_num_value_heads": 32,
}
KNOWN: dict[str, dict[str, Any]] = {
    "qwen3.8-27b": {**_27B, "quantization_config": {"quant_method": "escha"}},
    "qwen3.8-27b-bf16": _27B,
    "qwen3.5-9b-bf16": _9B,
}
