"""The three codebooks of the EXL3 family: a 16-bit trellis state becomes one weight.

Each is a cheap hash whose result is read as small floats, so a GPU can compute it in registers; the tables here are
exact. Standard deviations (the scale that data should be brought to) are 1.24371, 1.24411 and 1.0003.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

Name = Literal["3inst", "mcg", "mul1"]
STATES = 1 << 16
MCG_MULTIPLIER = 0xCBAC1FED
MUL1_MULTIPLIER = 0x83DCD12D
INST3_MULTIPLIER, INST3_INCREMENT = 89226354, 64248484
LOW32 = 0xFFFFFFFF


@functools.cache
def table(name: Name, dtype: torch.dtype = torch.float16, device: str | torch.device = "cpu") -> Tensor:
    """All 65,536 values [states], exact in fp16 and in anything wider. Shared: do not write to it."""
    values = {"3inst": _inst3, "mcg": _mcg, "mul1": _mul1}[name](torch.arange(STATES))
    return values.to(dtype).to(device)


def deviation(name: Name) -> float:
    """Standard deviation of the codebook's values."""
    return table(name, torch.float64).std().item()


def _mcg(state: Tensor) -> Tensor:
    return _sum_of_halves((state * MCG_MULTIPLIER) & LOW32)


def _inst3(state: Tensor) -> Tensor:
    return _sum_of_halves((state * INST3_MULTIPLIER + INST3_INCREMENT) & LOW32)


def _mul1(state: Tensor) -> Tensor:
    x = (state * MUL1_MULTIPLIER) & LOW32
    byte_sum = (x & 0xFF) + (x >> 8 & 0xFF) + (x >> 16 & 0xFF) + (x >> 24)
    scale, offset = _half(torch.tensor(0x1EEE)).float(), _half(torch.tensor(0xC931)).float()
    # The format rounds once, as a fused multiply-add; product and sum are exact in fp32 (22 bits), so this does too.
    return ((byte_sum + 1024).float() * scale + offset).half()


def _sum_of_halves(x: Tensor) -> Tensor:
    """Sign, low exponent bit and mantissa of two halves come from the hash, the rest of the exponent is fixed."""
    r = (x & 0x8FFF8FFF) ^ 0x3B603B60
    return (_half(r & 0xFFFF).float() + _half(r >> 16).float()).half()  # exact in fp32, rounded once


def _half(bits: Tensor) -> Tensor:
    return bits.to(torch.uint16).view(torch.float16)
