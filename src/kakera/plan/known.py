"""Shapes of well-known models by name, so that `kakera plan` works before anything is downloaded, and the checkpoints
that `kakera up` knows. No torch.

Source of the numbers: the public config.json of each model; Escha's quantisation is that of its own repository, that of
Qwen3.8-Flash-Next its smallest EXL3 build (2.05bpw_h4_ng4). EXL3 builds of the 27B have a head of 6 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
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
_35B: dict[str, Any] = {
    **_FAMILY,
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# one model of its own: no other has these keys
_FLASH_NEXT: dict[str, Any] = {
    **{key: value for key, value in _FAMILY.items() if key != "eos_token_id"},
    "model_type": "qwen4_exp_text",
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 48,
    "output_gate_type": "sigmoid",
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "hc_count": 4,
    "hc_lowrank": 320,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "eos_token_id": 248044,
}
EXL3_BITS = (2.5, 3.0, 4.0)
KNOWN: dict[str, dict[str, Any]] = {
    "qwen3.8-27b": {**_27B, "quantization_config": {"quant_method": "escha"}},
    **{
        f"qwen3.8-27b-exl3-{bits}bpw": {
            **_27B,
            "quantization_config": {"quant_method": "exl3", "bits": bits, "head_bits": 6},
        }
        for bits in EXL3_BITS
    },
    "qwen3.8-27b-bf16": _27B,
    "qwen3.5-9b-bf16": _9B,
    "qwen3.6-35b-a3b": {**_35B, "quantization_config": {"quant_method": "eschamoe"}},
    "qwen3.6-35b-a3b-exl3-3.0bpw": {
        **_35B,
        "quantization_config": {"quant_method": "exl3", "bits": 3.0, "head_bits": 6},
    },
    "qwen3.6-35b-a3b-bf16": _35B,
    "qwen3.8-flash-next": {
        **_FLASH_NEXT,
        "quantization_config": {
            "quant_method": "exl3",
            "bits": 2.05,
            "head_bits": 4,
            "mtp_bits": 2,
            "codebook": "mul1",
        },
    },
}


@dataclass(frozen=True)
class Published:
    """A checkpoint that somebody offers: `name` as on the command line, `shape` one of KNOWN (or `mini`, which comes
    along), `bytes` to download. `unserved`: why kakera can not serve it yet, "" if it can."""

    name: str
    shape: str
    bytes: int
    about: str
    unserved: str = ""


# Best first. None of those on the hub has been run by kakera's developers: sizes and formats are their owners' words.
PUBLISHED: tuple[Published, ...] = (
    Published(
        "turboderp/Qwen3.8-Flash-Next-exl3",
        "qwen3.8-flash-next",
        62_600_000_000,
        "EXL3, 180B of which a token uses a few",
        unserved="kakera can plan this architecture and not serve it yet",
    ),
    Published("EschaLabs/Qwen3.8-27B-Escha-W2", "qwen3.8-27b", 10_153_088_224, "Escha-W2, 27B dense, 2.5 bits"),
    Published(
        "EschaLabs/Qwen3.6-35B-A3B-Escha-W2",
        "qwen3.6-35b-a3b",
        12_220_000_000,
        "Escha-W2, 35B of which a token uses 3B",
        unserved="kakera serves mixtures of experts on a CPU only so far",
    ),
    Published("mini", "mini", 0, "a test piece of 95M parameters that comes along: it finds facts and calls tools"),
)
