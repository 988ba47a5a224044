"""The block Hadamard transform: an unnormalised 128-point Sylvester matrix on every 128 contiguous channels.

H = H^T and H H = 128 I, so one matrix serves both directions. A product with the 128 x 128 matrix is as fast as a
butterfly on CPUs and GPUs here (both have fast matmuls), and shorter.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK = 128


@functools.cache
def hadamard_matrix(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
    """H [128, 128] with entries (-1)^popcount(a & b). Shared: do not write to it."""
    h = torch.ones(1, 1, dtype=dtype)
    while h.shape[0] < BLOCK:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h.to(device)


def hadamard(x: Tensor, dim: int = -1, scale: float = 1.0) -> Tensor:
    """The transform along dim 0 or -1 of x, times `scale`, in x's dtype (fp32 or fp64)."""
    h = hadamard_matrix(x.dtype, x.device)
    if scale != 1.0:
        h = h * scale
    if dim == 0:
        return torch.matmul(h, x.reshape(-1, BLOCK, x.shape[-1])).reshape(x.shape)
    return (x.reshape(-1, BLOCK) @ h).reshape(x.shape)
