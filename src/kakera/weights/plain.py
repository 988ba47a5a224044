"""Plain linears: one `weight` [O, I] in bf16, fp16 or fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.arch.tensors import Cut
from kakera.weights.leaves import Leaves

MARK = "weight"
LEAVES = (MARK, "bias")
STORED = (torch.bfloat16, torch.float16, torch.float32)


def shape(leaves: Leaves) -> tuple[int, ...]:
    leaves.refuse_unknown(LEAVES)
    return leaves[MARK].shape


def read(
    leaves: Leaves,
    out_channels: int,
    in_channels: int,
    dtype: torch.dtype,
    device: str | torch.device,
    cut: Cut | None = None,
) -> Tensor:
    """Weight [O, I], or a rank's part of it."""
    leaves.refuse_unknown(LEAVES)
    return leaves.read(MARK, (out_channels, in_channels), dtype, device, stored_as=STORED, cut=cut)
