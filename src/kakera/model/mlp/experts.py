"""Routed experts beside a shared one, in plain torch: what a CPU computes, and what kernels are measured against.

An expert's rows are computed in products whose shape does not depend on how many chose it (`kakera.ops.linear`), those
of decode one by one: the bits of a row are its own, whatever others choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.arch.moe import Moe
from kakera.arch.spec import ModelSpec
from kakera.model.blocks import Flat
from kakera.model.mlp.dense import DenseMlp
from kakera.model.weights import MoeWeights
from kakera.ops.moe import combine, group, route


@dataclass(frozen=True)
class MoeMlp:
    """Sum of a row's experts, each times its share, plus the shared expert times the sigmoid of its gate.

    Rounded to the activations' dtype: logits, what an expert gives, shares, the routed sum. float32: the softmax, the
    sum over experts, the shared expert's gate and the last sum.
    """

    block: Moe
    weights: MoeWeights

    def __call__(self, x_TH: Tensor, decode_tokens: int = 0) -> Tensor:
        weights, experts = self.weights, self.block.experts
        gates_TG = weights.gates(x_TH, decode_tokens)
        expert_TK, share_TK = route(gates_TG[:, :experts], self.block.top)
        routed_TH = combine(self._slots(x_TH, expert_TK, decode_tokens), share_TK.to(x_TH.dtype).float())
        shared_TH = DenseMlp(weights.shared)(x_TH, decode_tokens).float() * gates_TG[:, experts:].float().sigmoid()
        return (routed_TH.to(x_TH.dtype).float() + shared_TH).to(x_TH.dtype)

    def _slots(self, x_TH: Tensor, expert_TK: Tensor, decode_tokens: int) -> Tensor:
        """What every slot's expert gives, [T x top, H]."""
        experts = [DenseMlp(weights) for weights in self.weights.experts]
        slot_TKH = x_TH.new_empty(*expert_TK.shape, self.block.hidden)
        for row, numbers in enumerate(expert_TK[:decode_tokens].tolist()):
            for place, number in enumerate(numbers):
                slot_TKH[row, place] = experts[number](x_TH[row : row + 1], 1)[0]
        rows_TH, slot_SH = x_TH[decode_tokens:], slot_TKH[decode_tokens:].flatten(0, 1)
        for expert, slots_N in zip(experts, group(expert_TK[decode_tokens:], len(experts)), strict=True):
            if len(slots_N):
                slot_SH[slots_N] = expert(rows_TH[slots_N // self.block.top])
        return slot_TKH.flatten(0, 1)


def build(spec: ModelSpec, layers: Sequence[MoeWeights], device: torch.device, dtype: torch.dtype) -> Flat:
    block = next(block for block in spec.distinct if isinstance(block, Moe))
    return Flat([MoeMlp(block, weights) for weights in layers], capturable=False)
