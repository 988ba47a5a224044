"""Full attention around a KV cache: the projections, and what a head is. `kv.backend` computes what lies between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.kv.backend import Attention, AttentionPass
from kakera.kv.batch import Batch, Kept
from kakera.model.state import StatePool
from kakera.model.weights import AttentionWeights
from kakera.ops.heads import ProjectedHeads
from kakera.ops.rotary import Rotary, frequencies

Attend = Callable[[ProjectedHeads], Tensor]  # -> o_TI, gated


class FullAttention:
    """The full-attention layers of a model."""

    capturable = True  # as far as it goes: the rest is the backend's

    def __init__(self, spec: ModelSpec, layers: Sequence[AttentionWeights], device: torch.device):
        self._spec, self._layers, yarn = spec, layers, spec.attention.yarn
        self._frequencies_F = frequencies(spec.rotary_dim, spec.rope_theta, yarn).to(device)
        self._scale = 1.0 if yarn is None else yarn.scale
        self._axes_F = None if spec.vision is None else torch.tensor(spec.vision.axes, device=device)

    def plan(self, batch: Batch, attention: Attention, states: StatePool) -> _Pass:
        rotary = Rotary.at(batch.positions_T, self._frequencies_F, self._scale, self._axes_F)
        return _Pass(self._spec, self._layers, rotary, attention.plan(batch), batch.decode_tokens)

    def commit(self, kept: Sequence[Kept], states: StatePool) -> None:
        """Pages, ring and sink hold a token by its position; the next one there replaces what did not stay."""


def build(
    spec: ModelSpec, layers: Sequence[AttentionWeights], device: torch.device, dtype: torch.dtype
) -> FullAttention:
    return FullAttention(spec, layers, device)


@dataclass(frozen=True)
class _Pass:
    spec: ModelSpec
    layers: Sequence[AttentionWeights]
    rotary: Rotary
    attention: AttentionPass
    decode_tokens: int

    def run(self, layer: int, x_TH: Tensor) -> Tensor:
        attend = partial(self.attention.run, layer)
        return full_attention(self.layers[layer], self.spec, x_TH, self.rotary, attend, self.decode_tokens)


def full_attention(
    weights: AttentionWeights, spec: ModelSpec, x_TH: Tensor, rotary: Rotary, attend: Attend, decode_tokens: int = 0
) -> Tensor:
    """One layer over x_TH [T, H]; `decode_tokens` as in `linear`.

    `attend` norms, turns and stores keys and values, attends with scale head_dim^-0.5 and gates.
    """
    D = spec.head_dim
    width, kv_width = spec.heads * D, spec.kv_heads * D
    qkv = weights.proj_in(x_TH, decode_tokens).contiguous()
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
    return weights.proj_out(attend(heads), decode_tokens)
