"""Rotary position embedding: half rotation (NeoX) of the first channels of each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.arch.rope import Yarn


@dataclass(frozen=True)
class Rotary:
    """cos and sin of every row's angles, float32 [T, 1, rotary_dim / 2]."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def at(positions_T: Tensor, frequencies_F: Tensor, scale: float = 1.0, axes_F: Tensor | None = None) -> Rotary:
        """Angles are position x frequency, multiplied in float32 as in training. `scale` of cos and sin. Positions
        [3, T]: `axes_F` says which of the three turns each pair of channels."""
        if positions_T.dim() == 1:
            angles = positions_T.float()[:, None, None] * frequencies_F
        else:
            assert axes_F is not None, "three positions a token, and a model that knows of one"
            angles = (positions_T.float()[axes_F].t().contiguous() * frequencies_F)[:, None]  # kernels read rows
        cos, sin = angles.cos(), angles.sin()
        return Rotary(cos, sin) if scale == 1.0 else Rotary(cos * scale, sin * scale)


def frequencies(rotary_dim: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """1 / theta^(2 i / rotary_dim), float32 [rotary_dim / 2], stretched as `arch/rope.py` says; to the bit as
    transformers' modeling_rope_utils has them."""
    turns = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if yarn is None:
        return 1.0 / turns
    low, high = yarn.low, yarn.high if yarn.high != yarn.low else yarn.high + 0.001
    kept = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (yarn.factor * turns) * (1 - kept) + 1.0 / turns * kept


def rotate(x_TXD: Tensor, rotary: Rotary) -> Tensor:
    """x with its first rotary_dim channels rotated: (a, b) -> (a cos - b sin, b cos + a sin), halves a and b."""
    half = rotary.cos.shape[-1]
    a, b, rest = x_TXD[..., :half].float(), x_TXD[..., half : 2 * half].float(), x_TXD[..., 2 * half :]
    turned = torch.cat([a * rotary.cos - b * rotary.sin, b * rotary.cos + a * rotary.sin], dim=-1)
    return torch.cat([turned.to(x_TXD.dtype), rest], dim=-1)


def rotate_reference(x_TXD: Tensor, positions: list[int], rotary_dim: int, theta: float) -> Tensor:
    """The same as complex multiplication, one row at a time, in float64."""
    out = x_TXD.double().clone()
    half = rotary_dim // 2
    for t, position in enumerate(positions):
        angles = position / theta ** (torch.arange(half, dtype=torch.float64) * 2 / rotary_dim)
        pairs = torch.complex(out[t, :, :half], out[t, :, half:rotary_dim]) * torch.polar(
            torch.ones(half).double(), angles
        )
        out[t, :, :half], out[t, :, half:rotary_dim] = pairs.real, pairs.imag
    return out.to(x_TXD.dtype)
