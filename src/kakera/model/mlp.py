"""The feed-forward block."""

from __future__ import annotations

from torch import Tensor

from kakera.model.weights import MlpWeights
from kakera.ops.activation import swiglu
from kakera.ops.linear import linear


def mlp(weights: MlpWeights, x_TH: Tensor, fast_rows: int = 0) -> Tensor:
    """down(silu(gate x) * (up x)) over all rows; `fast_rows` as in `linear`."""
    return linear(swiglu(linear(x_TH, weights.gate_up_OI, fast_rows)), weights.down_OI, fast_rows)
