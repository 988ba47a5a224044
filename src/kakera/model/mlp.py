"""The feed-forward block: down(silu(gate x) up x)."""

from __future__ import annotations

from torch import Tensor

from kakera.model.weights import MlpWeights
from kakera.ops.activation import swiglu
from kakera.ops.linear import linear


def mlp(weights: MlpWeights, x_TH: Tensor) -> Tensor:
    return linear(swiglu(linear(x_TH, weights.gate_up_OI)), weights.down_OI)
