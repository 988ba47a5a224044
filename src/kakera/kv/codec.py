"""The 2-bit codec: fit a grid, round, pack and unpack. The only place where a key or a value becomes a code.

Four equidistant levels for each group of consecutive rotated dims. The scale and the *minimum* are stored, not a zero
point: a constant row has a zero point near -1e8, which is infinite in fp16, while its minimum is harmless.

Graded rows (`encode_graded`) have the same bytes with two groups, and decode the same way, to *digits*. Of dims that a
calibrated rotation has put in falling order of variance, the first quarter has two digits, 16 levels, the middle half
one, and the last quarter none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WINDOW_DTYPE = torch.bfloat16  # of the sink, the window and every key and value before it is coded
LEVELS = 4
GAUSSIAN_STEP = 0.9957  # in standard deviations: the four equidistant levels of least error (Max, 1960)
FINE_LEVELS = LEVELS * LEVELS
FINE_GAUSSIAN_STEP = 0.3352  # the same for 16 levels
DIGIT = 1.0 / LEVELS  # weight of the second digit
FP16_MAX = 65504.0
MOST_STRETCH = 1.25  # a Gaussian group takes 1.13; where one outlier makes the fit poor, more would only add noise
TINY = 1e-30  # the product of a row with itself is nothing only if the row is
SMALLEST_SCALE = 2.0**-24  # the smallest positive fp16: a group of equal values must not divide by zero
_FIELD_MASKS = tuple(0x03 << 2 * quarter for quarter in range(4))


class Int2Rows(NamedTuple):
    """Coded rows. codes: uint8 [..., D / 4]; scale, minimum: float16 [..., D / group]."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor


def encode(x: Tensor, group: int) -> Int2Rows:
    """Code rows x [..., D] in groups of `group` consecutive dims. Values outside the fp16 range are clamped to it.

    The grid that suits a Gaussian with the group's mean and deviation gives first codes, least squares over them the
    grid of the final ones. What is stored is that grid stretched until decoded . x = x . x: least squares leaves a row
    12 % short, and its logits and its part of an output small beside those of 16-bit rows. Sums of bf16 values and
    products are exact in float64: neither their order nor the shape of x can change a code.
    """
    x = torch.unflatten(x.float().clamp(-FP16_MAX, FP16_MAX), -1, (-1, group))
    levels, scale, minimum = _fit(x, LEVELS, GAUSSIAN_STEP)
    return Int2Rows(pack(levels.flatten(-2)), _to_half(scale), _to_half(minimum))


def encode_graded(x: Tensor) -> Int2Rows:
    """Code rows x [..., D] whose dims come in falling order of variance; two groups of D / 2 digits each.

    Digits: the coarse ones of the first D / 4 dims, their fine ones, those of the middle D / 2. With c and f decoded
    alike, c + f / 4 has the levels 4 c + f: `from_digits` and `to_digits` are linear, and attention need not know.
    """
    quarter = x.shape[-1] // 4
    x = x.float().clamp(-FP16_MAX, FP16_MAX)
    fine, fine_step, fine_minimum = _fit(x[..., :quarter], FINE_LEVELS, FINE_GAUSSIAN_STEP)
    middle, step, minimum = _fit(x[..., quarter : 3 * quarter], LEVELS, GAUSSIAN_STEP)
    coarse = (fine / LEVELS).floor()
    codes = pack(torch.cat((coarse, fine - LEVELS * coarse, middle), -1))
    # the minimum enters with both digits, once whole and once by a quarter
    scales, minima = torch.cat((fine_step / DIGIT, step), -1), torch.cat((fine_minimum / (1 + DIGIT), minimum), -1)
    return Int2Rows(codes, _to_half(scales.unsqueeze(-1)), _to_half(minima.unsqueeze(-1)))


def from_digits(y: Tensor) -> Tensor:
    """Rotated dims [..., D] of decoded digits [..., D]: linear, so that it may follow a sum over tokens."""
    quarter = y.shape[-1] // 4
    coarse, fine, middle = torch.split(y, [quarter, quarter, 2 * quarter], -1)
    return torch.cat((coarse + DIGIT * fine, middle, torch.zeros_like(coarse)), -1)


def to_digits(q: Tensor) -> Tensor:
    """The transpose of `from_digits`: q . from_digits(y) = to_digits(q) . y."""
    quarter = q.shape[-1] // 4
    first, middle, _ = torch.split(q, [quarter, 2 * quarter, quarter], -1)
    return torch.cat((first, DIGIT * first, middle), -1)


def _fit(x: Tensor, count: int, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Levels 0 .. count - 1 of groups x [..., W], and the stretched scale and minimum [..., 1] in float64.

    `step`: of the grid that is best for a Gaussian, in standard deviations.
    """
    group = x.shape[-1]
    sum_x, sum_xx = _sum(x), _sum(x * x)
    mean = sum_x / group
    scale = step * (sum_xx / group - mean * mean).clamp(min=0).sqrt()
    levels, _, _ = _round(x, scale, mean - (count - 1) / 2 * scale, count)

    sum_l = _sum(levels)
    spread = _sum(levels * levels) - sum_l * sum_l / group  # 0 where all levels are equal, else at least 1 - 1 / group
    scale = (_sum(levels * x) - sum_l * mean).clamp(min=0) / spread.clamp(min=0.5)
    levels, scale, minimum = _round(x, scale, mean - scale * sum_l / group, count)

    overlap = scale * _sum(levels * x) + minimum * sum_x
    stretch = ((sum_xx + TINY) / (overlap + TINY)).clamp(1 / MOST_STRETCH, MOST_STRETCH)
    return levels, stretch * scale, stretch * minimum


def _to_half(parameter: Tensor) -> Tensor:
    return parameter.clamp(-FP16_MAX, FP16_MAX).half().squeeze(-1)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True, dtype=torch.float64)


def _round(x: Tensor, scale: Tensor, minimum: Tensor, count: int = LEVELS) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest levels (half up) of the grid, and its scale and minimum as fp16 has them, in float32."""
    scale = scale.clamp(min=SMALLEST_SCALE, max=FP16_MAX).half().float()
    minimum = minimum.clamp(-FP16_MAX, FP16_MAX).half().float()
    return ((x - minimum) / scale).add_(0.5).floor_().clamp_(0, count - 1), scale, minimum


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
