"""RMS norms and the L2 norm, in float32 inside.

The family has two RMS norms: one that stores w of (1 + w), everywhere but inside Gated DeltaNet, and one with a plain
weight, gated by SiLU, inside it. The loader adds the one, so that here every scale is a plain factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.ops.activation import silu

L2_EPS = 1e-6


def rms_norm(x_TH: Tensor, scale_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) scale over the last dimension; `scale_H` float32; result in x's dtype."""
    return _unit_rms(x_TH.float(), eps).mul_(scale_H).to(x_TH.dtype)


def rms_norm_gated(x_TVD: Tensor, gate_TVD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
    """The norm inside Gated DeltaNet: rms_norm(x) scale silu(gate), rounded to the gate's dtype before the scale."""
    normed = _unit_rms(x_TVD.float(), eps).to(gate_TVD.dtype).float()
    return silu(gate_TVD).mul_(scale_D).mul_(normed).to(gate_TVD.dtype)


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    """A new tensor. Spelled out: `F.rms_norm` on a CPU is a chain of ten operations, 60 us for one row of 512."""
    return x * (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()


def l2_norm(x_TD: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in float32. The eps goes to the sum, not to the mean."""
    x = x_TD.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def rms_norm_reference(x_TH: Tensor, scale_H: Tensor, eps: float) -> Tensor:
    """One row at a time in float64."""
    rows = [x / (x.dot(x) / len(x) + eps).sqrt() for x in x_TH.double()]
    return torch.stack(rows).mul(scale_H.double()).to(x_TH.dtype)
