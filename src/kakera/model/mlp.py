"""The feed-forward block."""

from __future__ import annotations

from torch import Tensor

from kakera.model.weights import MlpWeights
from kakera.ops.fused import swiglu


def mlp(weights: MlpWeights, x_TH: Tensor, fast_rows: int = 0) -> Tensor:
    """down(silu(gate x) * (up x)) over all rows; `fast_rows` as in `linear`."""
    return weights.down(swiglu(weights.gate_up(x_TH, fast_rows)), fast_rows)
