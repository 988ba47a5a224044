"""Writes a model directory with random weights and every part that serving needs. 0.5 M parameters.

torch is imported when weights are made: rooms without torch use the config and the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

from kakera.text.tokenizer import byte_alphabet

HIDDEN, INTERMEDIATE, VOCAB = 64, 128, 320
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64  # a group of 3: what assumes powers of two shows
K_HEADS, V_HEADS, GDN_DIM, TAPS = 2, 4, 32, 4
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "linear_num_key_heads": K_HEADS,
    "linear_num_value_heads": V_HEADS,
    "linear_key_head_dim": GDN_DIM,
    "linear_value_head_dim": GDN_DIM,
    "linear_conv_kernel_dim": TAPS,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 256 + SPECIAL.index("<|im_end|>"),
}
TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def write_tiny_model(directory: Path, seed: int = 0, draft: bool = False) -> None:
    from safetensors.torch import save_file

    from tiny_weights import random_tensors

    save_file(random_tensors(seed, draft), directory / "model.safetensors")
    config = {**CONFIG, "mtp_num_hidden_layers": 1} if draft else CONFIG
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": CONFIG["eos_token_id"]}))
    (directory / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def byte_tokenizer() -> dict:
    """tokenizer.json of byte-level BPE without merges: a token a byte, then the added tokens."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 256 + i, "content": t, "special": i < 3, **plain} for i, t in enumerate(SPECIAL)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": dict(byte_alphabet()), "merges": []},
    }
