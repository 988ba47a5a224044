"""Int8 rows on a GPU: a linear (the head of an Escha checkpoint) and a look-up (its embedding).

Reference of both: `int8_weight`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kakera.ops.cuda.compiler import kernel
from kakera.target.as_torch import HALVES

FEW_ROWS = 32
MANY_ROWS = 704  # from here on decoding is faster: 13 ms for 248,320 x 5,120 on an H200, passes of 32 rows 0.6 each
PIECE_ROWS = 8192  # output channels decoded at a time: 84 MB in 16 bit at 5,120 inputs
ROW_STEP = 16  # output channels of a warp
COLUMN_STEP = 64  # input channels of a warp's step
ROW_BLOCK_VALUES = 4 << 20  # decoded at a time: bounds the fp32 temporary to 16 MiB


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scale", "y")),
        *((name, ctypes.c_int) for name in ("rows", "inputs", "outputs", "x_stride", "y_stride", "pad")),
    ]


def int8_weight(q_OI: Tensor, scale_O: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight [O, I] in `dtype`, after the format's rounding to fp16."""
    weight_OI = torch.empty(q_OI.shape, dtype=dtype, device=q_OI.device)
    rows = max(1, ROW_BLOCK_VALUES // max(1, q_OI.shape[1]))
    for start in range(0, q_OI.shape[0], rows):
        block = slice(start, start + rows)
        weight_OI[block] = (q_OI[block].float() * scale_O[block, None].float()).half()
    return weight_OI


def int8_linear(x_TI: Tensor, q_OI: Tensor, scale_O: Tensor) -> Tensor:
    """[T, O] in x's dtype, float16 or bfloat16. q_OI int8, scale_O float16; I a multiple of 64, O of 16.

    Raises ValueError.
    """
    outputs, inputs = q_OI.shape
    if inputs % COLUMN_STEP or outputs % ROW_STEP:
        raise ValueError(
            f"int8 rows of {inputs} x {outputs}: inputs go in steps of {COLUMN_STEP}, outputs of {ROW_STEP}"
        )
    if x_TI.dtype not in HALVES:  # the kernel would read other bytes as fp16
        raise ValueError(f"int8 rows take float16 or bfloat16, not {x_TI.dtype}")
    y_TO = x_TI.new_empty(len(x_TI), outputs)
    if len(x_TI) >= MANY_ROWS:
        for first in range(0, outputs, PIECE_ROWS):
            piece = slice(first, first + PIECE_ROWS)
            torch.mm(x_TI, int8_weight(q_OI[piece], scale_O[piece], x_TI.dtype).t(), out=y_TO[:, piece])
        return y_TO
    for start in range(0, len(x_TI), FEW_ROWS):
        _few(x_TI[start : start + FEW_ROWS], q_OI, scale_O, y_TO[start : start + FEW_ROWS])
    return y_TO


def int8_rows(q_VH: Tensor, scale_V: Tensor, tokens_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows tokens_T of the table, [T, H] in `dtype`, rounded to fp16 first, as the format says."""
    return (q_VH[tokens_T].float() * scale_V[tokens_T, None].float()).half().to(dtype)


def _few(x_TI: Tensor, q_OI: Tensor, scale_O: Tensor, y_TO: Tensor) -> None:
    outputs, inputs = q_OI.shape
    rows = len(x_TI)
    launch = _Launch(rows=rows, inputs=inputs, outputs=outputs, x_stride=x_TI.stride(0), y_stride=y_TO.stride(0))
    launch.x, launch.weight, launch.y = x_TI.data_ptr(), q_OI.data_ptr(), y_TO.data_ptr()
    launch.scale = scale_O.data_ptr()
    groups = 1 if rows <= 8 else 2 if rows <= 16 else 4
    channels = 128 if groups == 4 else 64  # of a thread block
    defines = (f"GROUPS={groups}", *(("BF16",) if x_TI.dtype == torch.bfloat16 else ()))
    kernel("int8_few", 128, defines, x_TI.device.index).launch((-(-outputs // channels), 1), launch)
