"""Pointwise steps between the linears of a layer: one launch each on a GPU with 16-bit activations.

Elsewhere, and as their reference: the plain operations of `ops.norm` and `ops.activation`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kakera.ops import activation
from kakera.ops.cuda.compiler import kernel
from kakera.ops.dtypes import HALVES
from kakera.ops.norm import rms_norm

EIGHT = 8  # channels of a load
THREADS = 256
MOST_VECTORS = 4  # eights of channels that a thread of the norm holds: 8,192 channels; 8 spill


class _AddNorm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "delta", "scale", "sum", "y")),
        ("eps", ctypes.c_float),
        ("channels", ctypes.c_int),
    ]


class _Swiglu(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "y")),
        *((name, ctypes.c_int) for name in ("channels", "row_stride")),
    ]


def add_rms_norm(x_TH: Tensor, delta_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta and its RMS norm times `scale_H` (float32), both in x's dtype."""
    channels = x_TH.shape[1]
    vectors = -(-channels // (EIGHT * THREADS))
    if not _has_kernel(x_TH, channels) or vectors > MOST_VECTORS:
        return add_rms_norm_reference(x_TH, delta_TH, scale_H, eps)
    x_TH, delta_TH = x_TH.contiguous(), delta_TH.contiguous()
    sum_TH, y_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
    launch = _AddNorm(eps=eps, channels=channels, x=x_TH.data_ptr(), delta=delta_TH.data_ptr())
    launch.scale, launch.sum, launch.y = scale_H.data_ptr(), sum_TH.data_ptr(), y_TH.data_ptr()
    run = kernel("add_norm", THREADS, (f"VECTORS={vectors}", *_dtype(x_TH)), x_TH.device.index)
    run.launch((len(x_TH), 1), launch, dependent=True)
    return sum_TH, y_TH


def add_rms_norm_reference(x_TH: Tensor, delta_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_TH = x_TH + delta_TH
    return sum_TH, rms_norm(sum_TH, scale_H, eps)


def swiglu(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) up, from the two halves of the last dimension, in the input's dtype."""
    rows, channels = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    if not _has_kernel(gate_up_T2I, channels) or not _aligned(gate_up_T2I):
        return activation.swiglu(gate_up_T2I)
    y_TI = gate_up_T2I.new_empty(rows, channels)
    launch = _Swiglu(gate_up=gate_up_T2I.data_ptr(), y=y_TI.data_ptr())
    launch.channels, launch.row_stride = channels, gate_up_T2I.stride(0)
    run = kernel("swiglu", THREADS, _dtype(gate_up_T2I), gate_up_T2I.device.index)
    run.launch((-(-channels // (EIGHT * THREADS)), rows), launch, dependent=True)
    return y_TI


def _has_kernel(x_TI: Tensor, channels: int) -> bool:
    return x_TI.device.type == "cuda" and x_TI.dtype in HALVES and channels % EIGHT == 0 and 0 < len(x_TI) < 65536


def _aligned(x_TI: Tensor) -> bool:
    """Rows begin where eight channels can be loaded at once."""
    return x_TI.stride(1) == 1 and x_TI.stride(0) % EIGHT == 0 and x_TI.data_ptr() % (2 * EIGHT) == 0


def _dtype(x: Tensor) -> tuple[str, ...]:
    return ("BF16",) if x.dtype == torch.bfloat16 else ()
