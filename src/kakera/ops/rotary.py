"""Rotary position embedding: half rotation (NeoX) of the first channels of each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """cos and sin of every row's angles, float32 [T, 1, rotary_dim / 2]."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def at(positions_T: Tensor, rotary_dim: int, theta: float) -> Rotary:
        """Angles are position / theta^(2 i / rotary_dim), multiplied in float32 as in training."""
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions_T.device) / rotary_dim
        angles = positions_T.float()[:, None, None] * (1.0 / theta**steps)
        return Rotary(angles.cos(), angles.sin())


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
