"""The dense feed-forward block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.model.blocks import Flat
from kakera.model.weights import MlpWeights
from kakera.ops.fused import swiglu


@dataclass(frozen=True)
class DenseMlp:
    """down(silu(gate x) * (up x))."""

    weights: MlpWeights

    def __call__(self, x_TH: Tensor, decode_tokens: int = 0) -> Tensor:
        return self.weights.down(swiglu(self.weights.gate_up(x_TH, decode_tokens)), decode_tokens)


def build(spec: ModelSpec, layers: Sequence[MlpWeights], device: torch.device, dtype: torch.dtype) -> Flat:
    return Flat([DenseMlp(weights) for weights in layers])
