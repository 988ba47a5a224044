"""What the kernels of coded weights do not take is refused in words, on any machine, and never computed wrong."""

from __future__ import annotations

import pytest
import torch

from kakera.ops.codec.coded import CodedLinear
from kakera.ops.int8 import int8_linear
from kakera.ops.trellis import PARTS, TrellisLinear, TrellisScratch


def coded(inputs: int = 128, outputs: int = 128, codebook: str = "mcg") -> CodedLinear:
    code = torch.zeros(inputs // 16, outputs // 16, 32, dtype=torch.int16)
    return CodedLinear(code, torch.ones(inputs), torch.ones(outputs), codebook)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (coded(),) * (PARTS + 1),
        (coded(inputs=128), coded(inputs=256)),
        (coded(codebook="mcg"), coded(codebook="mul1")),
        (coded(inputs=192),),
        (coded(outputs=144),),
    ],
    ids=["none", "too many", "two inputs", "two codebooks", "odd inputs", "odd outputs"],
)
def test_linears_that_no_launch_can_take(parts):
    with pytest.raises(ValueError, match="one input and one codebook"):
        TrellisLinear(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_not_of_16_bit(dtype):
    x_TI = torch.zeros(1, 128, dtype=dtype)
    nothing = torch.empty(0)
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        TrellisLinear((coded(),))(x_TI, TrellisScratch(nothing, nothing, nothing, nothing))
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        int8_linear(x_TI, torch.zeros(16, 128, dtype=torch.int8), torch.ones(16, dtype=torch.float16))


def test_int8_rows_of_another_width():
    with pytest.raises(ValueError, match="steps of 64"):
        int8_linear(torch.zeros(1, 96).half(), torch.zeros(16, 96, dtype=torch.int8), torch.ones(16).half())
