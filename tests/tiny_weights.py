"""Random weights for the tiny model."""

from __future__ import annotations

import torch
from torch import Tensor

from tiny_model import CONFIG, GDN_DIM, HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, K_HEADS, KV_HEADS, TAPS, V_HEADS, VOCAB


def random_tensors(seed: int, draft: bool = False) -> dict[str, Tensor]:
    """bfloat16 tensors under the names of the checkpoint format, scaled so that activations stay near 1. `draft`: with
    a draft layer, too."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(width: int) -> Tensor:
        return torch.randn(width, generator=generator) * 0.2

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": matrix(VOCAB, HIDDEN) * 3,
        "model.norm.weight": norm(HIDDEN),
    }
    for i, kind in enumerate(CONFIG["layer_types"]):
        mixer = _gdn(matrix, norm, generator) if kind == "linear_attention" else _attention(matrix, norm)
        layer = mixer | _beside(matrix, norm)
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    if draft:
        layer = _attention(matrix, norm) | _beside(matrix, norm)
        tensors |= {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}
        tensors |= {
            f"mtp.{name}.weight": norm(HIDDEN) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        }
        tensors["mtp.fc.weight"] = matrix(HIDDEN, 2 * HIDDEN)
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def _beside(matrix, norm) -> dict[str, Tensor]:
    return {
        "input_layernorm.weight": norm(HIDDEN),
        "post_attention_layernorm.weight": norm(HIDDEN),
        "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
    }


def _attention(matrix, norm) -> dict[str, Tensor]:
    return {
        "self_attn.q_proj.weight": matrix(2 * HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": norm(HEAD_DIM),
        "self_attn.k_norm.weight": norm(HEAD_DIM),
    }


def _gdn(matrix, norm, generator: torch.Generator) -> dict[str, Tensor]:
    channels = 2 * K_HEADS * GDN_DIM + V_HEADS * GDN_DIM
    return {
        "linear_attn.in_proj_qkv.weight": matrix(channels, HIDDEN),
        "linear_attn.in_proj_z.weight": matrix(V_HEADS * GDN_DIM, HIDDEN),
        "linear_attn.in_proj_a.weight": matrix(V_HEADS, HIDDEN),
        "linear_attn.in_proj_b.weight": matrix(V_HEADS, HIDDEN),
        "linear_attn.A_log": torch.rand(V_HEADS, generator=generator),
        "linear_attn.dt_bias": torch.rand(V_HEADS, generator=generator) - 3,
        "linear_attn.conv1d.weight": torch.randn(channels, 1, TAPS, generator=generator) * 0.5,
        "linear_attn.norm.weight": 1 + norm(GDN_DIM),
        "linear_attn.out_proj.weight": matrix(HIDDEN, V_HEADS * GDN_DIM),
    }
