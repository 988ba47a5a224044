"""Bring a weight matrix to the shape that the codebook is made for: near Gaussian, of the codebook's own spread.

Random signs and a block Hadamard on both sides spread outliers over 128 channels; output- and input-channel rms scales
even out the rest; one global scale is searched by the coding error itself (the EXL3 quantiser's regularisation,
without the Hessian). Both scale vectors are rounded to fp16 before they are used, so the target already contains
the rounding that the file will have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.ops.codec.hadamard import BLOCK, hadamard

Encoder = Callable[[Tensor, int], Tensor]
"""(targets fp32 [tiles, 256] in stream order, bits) -> states int32 [tiles, 256]."""
COARSE = (0.75, 0.875, 1.0, 1.125, 1.25)  # of the codebook's deviation; a Gaussian's optimum is 1.00 to 1.06
FINE = (-0.08, -0.04, 0.0, 0.04, 0.08)


@dataclass(frozen=True)
class Scales:
    """Signed channel scales as they are stored: in_scale fp16 [I], out_scale fp16 [O]. Zero for a channel of zeros."""

    in_scale: Tensor
    out_scale: Tensor

    def target(self, weight_OI: Tensor, first: int, last: int) -> Tensor:
        """What the code of input channels first .. last (multiples of 128) should decode to: fp32 [last - first, O]."""
        scaled_IO = weight_OI[:, first:last].T.float() * _inverse(self.in_scale[first:last])[:, None]
        scaled_IO *= _inverse(self.out_scale)
        return hadamard(hadamard(scaled_IO.contiguous(), -1, 1 / BLOCK), 0)


def channel_scales(weight_OI: Tensor, generator: torch.Generator) -> Scales:
    """Random signs times rms. The target under these scales has unit rms."""
    out_channels, in_channels = weight_OI.shape
    device = weight_OI.device
    sign_O, sign_I = (_signs(n, generator).to(device) for n in (out_channels, in_channels))
    rms_O = weight_OI.float().square().mean(1).sqrt()
    rms_O /= rms_O[rms_O > 0].mean() if rms_O.any() else 1.0
    out_scale = (rms_O * sign_O).half()
    rms_I = (weight_OI.float() * _inverse(out_scale)[:, None]).square().mean(0).sqrt()
    return Scales((rms_I * sign_I).half(), out_scale)


def search_scale(sample: Tensor, table: Tensor, bits: int, encode: Encoder) -> float:
    """Factor for unit-rms targets with the least coding error on `sample` [tiles, 256]: coarse, fine, parabola."""
    deviation = table.std().item()

    def errors(factors: list[float]) -> list[float]:
        scale = torch.tensor(factors, device=sample.device)[:, None, None] * deviation
        states = encode((sample * scale).flatten(0, 1), bits)
        decoded = table[states.long()].view(len(factors), *sample.shape) / scale
        return (decoded - sample).square().mean((1, 2)).tolist()

    coarse = errors(list(COARSE))
    centre = COARSE[coarse.index(min(coarse))]
    factors = [centre + step for step in FINE]
    fine = errors(factors)
    return deviation * _vertex(factors, fine)


def with_scale(scales: Scales, factor: float) -> Scales:
    """The scales under which the target is `factor` times as large."""
    return Scales((scales.in_scale.float() / factor).half(), scales.out_scale)


def _vertex(x: list[float], y: list[float]) -> float:
    """Minimum of the parabola through the lowest of equally spaced points and its neighbours."""
    i = min(max(y.index(min(y)), 1), len(y) - 2)
    curvature = y[i - 1] - 2 * y[i] + y[i + 1]
    if curvature <= 0:
        return x[y.index(min(y))]
    shift = (y[i - 1] - y[i + 1]) / (2 * curvature)
    return x[i] + max(-1.0, min(1.0, shift)) * (x[i + 1] - x[i])


def _signs(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (count,), generator=generator).float() * 2 - 1


def _inverse(scale: Tensor) -> Tensor:
    scale = scale.float()
    return torch.where(scale != 0, 1 / torch.where(scale != 0, scale, 1.0), 0.0)
