"""The 2-bit codec: clip, round, pack and unpack. The only place where a key or a value becomes a code.

Uniform min-max quantiser over groups of consecutive rotated dims with a per-row clip (the INT2 KV notes, "Quantiser"
and "Clip"). The scale and the *minimum* are stored, not a zero point: a constant row has a zero point near -1e8,
which is infinite in fp16, while its minimum is harmless.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WINDOW_DTYPE = torch.bfloat16  # of the sink, the window and every key and value before it is coded
CLIP_K, CLIP_V = 0.96, 0.92  # relative MSE of N(0,1) rows of 256: .159 and .129; without the clip .300
LEVELS = 4
FP16_MAX = 65504.0
SMALLEST_SCALE = 2.0**-24  # the smallest positive fp16: a group of equal values must not divide by zero
_FIELD_MASKS = tuple(0x03 << 2 * quarter for quarter in range(4))


class Int2Rows(NamedTuple):
    """Coded rows. codes: uint8 [..., D / 4]; scale, minimum: float16 [..., D / group]."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor


def clip_bound(x: Tensor, clip: float) -> Tensor:
    """The magnitude [..., 1] at which each row of x [..., D] is clipped: index min(floor(clip D), D - 1) in ascending
    order of magnitude."""
    dim = x.shape[-1]
    index = min(int(clip * dim), dim - 1)
    return x.abs().topk(dim - index, dim=-1).values[..., -1:]  # a fifth of the time of a sort


def encode(x: Tensor, bound: Tensor, group: int) -> Int2Rows:
    """Code rows x [..., D], clamped to +-bound [..., 1], in groups of `group` consecutive dims.

    The code is computed against the stored, fp16-rounded scale and minimum, so that the decoder sees the grid on
    which it was rounded. Values outside the fp16 range are clamped to it.
    """
    bound = bound.float().clamp(max=FP16_MAX)
    x = torch.unflatten(torch.minimum(torch.maximum(x.float(), -bound), bound), -1, (-1, group))
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / (LEVELS - 1)).clamp(min=SMALLEST_SCALE).half()
    low = low.half()
    levels = ((x - low.float()) / scale.float()).add_(0.5).floor_().clamp_(0, LEVELS - 1)
    return Int2Rows(pack(levels.flatten(-2)), scale.squeeze(-1), low.squeeze(-1))


def decode(rows: Int2Rows) -> Tensor:
    """The float32 values [..., D] that codes stand for: code * scale + minimum."""
    x = torch.unflatten(unpack(rows.codes).float(), -1, (rows.scale.shape[-1], -1))
    return x.mul_(rows.scale.float().unsqueeze(-1)).add_(rows.minimum.float().unsqueeze(-1)).flatten(-2)


def pack(levels: Tensor) -> Tensor:
    """Levels 0..3 [..., D] of any dtype to uint8 [..., D / 4]: byte i holds dims i, i + D/4, i + D/2, i + 3D/4.

    Low bits first. With planar quarters a mask, without a shift, yields D/4 consecutive dims.
    """
    a, b, c, d = levels.chunk(4, dim=-1)
    return a.add(b, alpha=4).add_(c, alpha=16).add_(d, alpha=64).to(torch.uint8)


def unpack(codes: Tensor) -> Tensor:
    """The inverse of `pack`, as uint8."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device).unsqueeze(-1)
    return (codes.unsqueeze(-2) >> shifts).bitwise_and_(0x03).flatten(-2)


def field_masks(device: torch.device) -> Tensor:
    """uint8 [4, 8]: the bits of each quarter in a byte, for eight bytes. Masked but not shifted, quarter i reads 4^i
    times its level."""
    return torch.tensor(_FIELD_MASKS, dtype=torch.uint8, device=device).unsqueeze(-1).repeat(1, 8)


def field_weights(head_dim: int, device: torch.device) -> Tensor:
    """float32 [D]: 4^-i for the dims of quarter i, which undoes what `field_masks` leaves in."""
    return (4.0 ** -torch.arange(4.0, device=device)).repeat_interleave(head_dim // 4)
