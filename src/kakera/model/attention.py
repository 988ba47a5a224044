"""The full-attention layer around the KV cache: its projections, and what a head is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kakera.model.weights import AttentionWeights
from kakera.ops.heads import ProjectedHeads
from kakera.ops.rotary import Rotary
from kakera.plan.spec import ModelSpec

Attend = Callable[[ProjectedHeads], Tensor]  # -> o_TI, gated


def full_attention(
    weights: AttentionWeights, spec: ModelSpec, x_TH: Tensor, rotary: Rotary, attend: Attend, fast_rows: int = 0
) -> Tensor:
    """One layer over x_TH [T, H]; `fast_rows` as in `linear`.

    `attend` norms, turns and stores keys and values, attends with scale head_dim^-0.5 and gates.
    """
    D = spec.head_dim
    width, kv_width = spec.heads * D, spec.kv_heads * D
    qkv = weights.proj_in(x_TH, fast_rows).contiguous()
    q, k, v, gate = torch.split(qkv, [width, kv_width, kv_width, qkv.shape[1] - width - 2 * kv_width], dim=1)
    heads = ProjectedHeads(
        torch.unflatten(q, 1, (spec.heads, D)),
        torch.unflatten(k, 1, (spec.kv_heads, D)),
        torch.unflatten(v, 1, (spec.kv_heads, D)),
        gate if spec.gated else None,
        weights.q_scale_D,
        weights.k_scale_D,
        spec.rms_eps,
        rotary,
    )
    return weights.proj_out(attend(heads), fast_rows)
