"""The full-attention layer around the KV cache: projections, QK-norm, RoPE, output gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kakera.model.weights import AttentionWeights
from kakera.ops.activation import sigmoid
from kakera.ops.norm import rms_norm
from kakera.ops.rotary import Rotary, rotate
from kakera.plan.spec import ModelSpec

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q_TQD, k_TKD, v_TKD -> o_TQD


def full_attention(
    weights: AttentionWeights, spec: ModelSpec, x_TH: Tensor, rotary: Rotary, attend: Attend, fast_rows: int = 0
) -> Tensor:
    """One layer over x_TH [T, H]; `fast_rows` as in `linear`.

    `attend` stores keys and values and attends with scale head_dim^-0.5. The gate is a sigmoid whatever
    `output_gate_type` of a config says: that key names the activation of the norm inside Gated DeltaNet.
    """
    D = spec.head_dim
    width, kv_width = spec.heads * D, spec.kv_heads * D
    qkv = weights.proj_in(x_TH, fast_rows).contiguous()
    q, k, v, gate = torch.split(qkv, [width, kv_width, kv_width, qkv.shape[1] - width - 2 * kv_width], dim=1)
    q_TQD = rotate(rms_norm(torch.unflatten(q, 1, (spec.heads, D)), weights.q_scale_D, spec.rms_eps), rotary)
    k_TKD = rotate(rms_norm(torch.unflatten(k, 1, (spec.kv_heads, D)), weights.k_scale_D, spec.rms_eps), rotary)
    v_TKD = torch.unflatten(v, 1, (spec.kv_heads, D)).contiguous()
    o_TI = attend(q_TQD, k_TKD, v_TKD).flatten(1)
    if spec.gated:
        o_TI = (sigmoid(gate) * o_TI).to(x_TH.dtype)
    return weights.proj_out(o_TI, fast_rows)
