"""Sigmoid, SiLU, softplus and SwiGLU whose bits do not depend on where an element lies in its tensor.

torch's own CPU kernels compute the elements behind the last full vector, and behind a thread's share, with another
exponential, so that the same value gives two results. `exp` and `log1p` do not; everything here is made of those and
of correctly rounded operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

SOFTPLUS_LINEAR = 20.0  # above it softplus(x) = x, as in torch and in the published models


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), computed and returned in float32."""
    return torch.exp(x.float().neg()).add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), computed and returned in float32."""
    x = x.float()
    return x / torch.exp(x.neg()).add_(1.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), computed and returned in float32."""
    x = x.float()
    return torch.where(x > SOFTPLUS_LINEAR, x, torch.log1p(torch.exp(x)))


def swiglu(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) up, from the two halves of the last dimension, in the input's dtype."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return silu(gate).mul_(up).to(gate_up_T2I.dtype)
