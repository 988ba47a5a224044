"""Plain 16-bit linears into a part of a wider result: one launch on a GPU for the few rows and channels of decoding.

Reference: `kakera.ops.linear.linear`, which also takes what has no kernel.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kakera.ops.cuda.compiler import kernel
from kakera.ops.dtypes import HALVES
from kakera.ops.linear import linear

FEW_ROWS, FEW_CHANNELS = 32, 256  # a thread block reads 8 rows of x for one channel; more is the library's business
THREADS = 128  # of dense_few.cu
ROWS = 8  # of a thread block, where there is more than one; a row has the same bits either way
EIGHT = 8  # channels of a load
MOST_VECTORS = 8  # eights of input channels of a thread: 8,192 channels


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y")),
        *((name, ctypes.c_int) for name in ("rows", "inputs", "x_stride", "y_stride")),
    ]


def linear_into(x_TI: Tensor, weight_OI: Tensor, y_TO: Tensor) -> None:
    """y <- x w^T. Rows of y may be part of longer ones; all of one dtype."""
    if not has_kernel(x_TI, weight_OI):
        y_TO.copy_(linear(x_TI, weight_OI))
        return
    (outputs, inputs), rows = weight_OI.shape, len(x_TI)
    launch = _Launch(rows=rows, inputs=inputs, x_stride=x_TI.stride(0), y_stride=y_TO.stride(0))
    launch.x, launch.weight, launch.y = x_TI.data_ptr(), weight_OI.data_ptr(), y_TO.data_ptr()
    each = ROWS if rows > 1 else 1
    defines = (f"ROWS={each}", f"VECTORS={_vectors(inputs)}", *(("BF16",) if x_TI.dtype == torch.bfloat16 else ()))
    run = kernel("dense_few", THREADS, defines, x_TI.device.index)
    run.launch((outputs, -(-rows // each)), launch, dependent=True)


def has_kernel(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether a kernel takes rows and weights of these sizes."""
    outputs, inputs = weight_OI.shape
    few = 0 < len(x_TI) <= FEW_ROWS and outputs <= FEW_CHANNELS
    even = inputs % EIGHT == 0 and x_TI.stride(0) % EIGHT == 0 and x_TI.stride(1) == 1 and weight_OI.is_contiguous()
    known = x_TI.is_cuda and x_TI.dtype == weight_OI.dtype and x_TI.dtype in HALVES
    return few and even and known and _vectors(inputs) <= MOST_VECTORS


def _vectors(inputs: int) -> int:
    return -(-inputs // (EIGHT * THREADS))
