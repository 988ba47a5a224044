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
        top = self.block.top
        slot_SH = torch.empty(expert_TK.numel(), self.block.hidden, dtype=x_TH.dtype, device=x_TH.device)
        for number, slots_N in enumerate(group(expert_TK, self.block.experts)):
            expert, decode = DenseMlp(self.weights.experts[number]), int((slots_N < decode_tokens * top).sum())
            for slot_1 in torch.split(slots_N[:decode], 1):
                slot_SH[slot_1] = expert(x_TH[slot_1 // top], 1)
            if decode < len(slots_N):
                slot_SH[slots_N[decode:]] = expert(x_TH[slots_N[decode:] // top])
        return slot_SH


def build(spec: ModelSpec, layers: Sequence[MoeWeights], device: torch.device, dtype: torch.dtype) -> Flat:
    block = next(block for block in spec.distinct if isinstance(block, Moe))
    return Flat([MoeMlp(block, weights) for weights in layers], capturable=False)
