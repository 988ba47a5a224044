"""A tiny plain checkpoint with real names, and an encoder that costs nothing."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kakera.ops.codec import trellis

CONFIG = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 512,
    "rope_theta": 1e7,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 1,
}


def shapes(prefix: str = "model.") -> dict[str, tuple[int, ...]]:
    """Shapes by stored name. Layer 1's k_proj and v_proj (64 rows) and o_proj (192 columns) can not be coded."""
    mlp = {"mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128), "mlp.down_proj": (128, 256)}
    attention = {"q_proj": (384, 128), "k_proj": (64, 128), "v_proj": (64, 128), "o_proj": (128, 192)}
    gdn = {"in_proj_qkv": (256, 128), "in_proj_z": (128, 128), "out_proj": (128, 128), "in_proj_a": (2, 128)}
    found: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (256, 128), "lm_head.weight": (256, 128)}
    for layer in (f"{prefix}layers.0.", f"{prefix}layers.1.", "mtp.layers.0."):
        found |= {f"{layer}{name}.weight": shape for name, shape in mlp.items()}
        found[f"{layer}input_layernorm.weight"] = (128,)
    for layer in (f"{prefix}layers.1.", "mtp.layers.0."):
        found |= {f"{layer}self_attn.{name}.weight": shape for name, shape in attention.items()}
    found |= {f"{prefix}layers.0.linear_attn.{name}.weight": shape for name, shape in gdn.items()}
    found |= {f"{prefix}layers.0.linear_attn.A_log": (2,), f"{prefix}layers.0.linear_attn.conv1d.weight": (256, 1, 4)}
    return found | {"mtp.fc.weight": (128, 256), f"{prefix}norm.weight": (128,)}


def write_tiny(directory: Path, prefix: str = "model.") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator).bfloat16() * 0.05 for n, s in shapes(prefix).items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def cheap_encode(targets: torch.Tensor, bits: int) -> torch.Tensor:
    """Valid tail-biting states without a search: symbols from the targets. Far from optimal, but deterministic."""
    symbols = ((targets.clamp(-2, 2) + 2) / 4 * ((1 << bits) - 1)).round().to(torch.int32)
    return trellis.unpack(trellis.pack(symbols, bits))
