"""Int8 rows: `weight_int8` [O, I] with one fp16 `weight_scale` [O]; symmetric, no zero point.

w = fp16(int8 * scale), computed in fp32 and rounded once (the Escha checkpoints' embedding and head).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.arch.tensors import Cut
from kakera.ops.int8 import int8_weight
from kakera.weights.leaves import Leaves

MARK = "weight_int8"
SCALE = "weight_scale"
LEAVES = (MARK, SCALE, "bias")


def shape(leaves: Leaves) -> tuple[int, ...]:
    leaves.refuse_unknown(LEAVES)
    return leaves[MARK].shape


def read_rows(
    leaves: Leaves, out_channels: int, in_channels: int, device: str | torch.device, cut: Cut | None = None
) -> tuple[Tensor, Tensor]:
    """Codes int8 [O, I] and scales fp16 [O] as stored, or a rank's part of them: every part of a row has its scale."""
    leaves.refuse_unknown(LEAVES)
    floats = (torch.float16, torch.float32)
    q_OI = leaves.read(MARK, (out_channels, in_channels), None, device, stored_as=(torch.int8,), cut=cut)
    scale_O = leaves.read(SCALE, (out_channels,), torch.float16, device, stored_as=floats, cut=cut)
    return q_OI, scale_O


def encode(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [O, I] and scales fp16 [O] of a weight: the largest magnitude of a row becomes 127."""
    weight_OI = weight_OI.float()
    scale_O = (weight_OI.abs().amax(dim=1) / 127).half()
    step_O = torch.where(scale_O > 0, scale_O, torch.ones_like(scale_O)).float()
    return (weight_OI / step_O[:, None]).round().clamp(-127, 127).to(torch.int8), scale_O


def read(
    leaves: Leaves,
    out_channels: int,
    in_channels: int,
    dtype: torch.dtype,
    device: str | torch.device,
    cut: Cut | None = None,
) -> Tensor:
    """Weight [O, I], or a rank's part of it."""
    return int8_weight(*read_rows(leaves, out_channels, in_channels, device, cut), dtype)
