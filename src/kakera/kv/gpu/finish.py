"""The last step of attention on a GPU: back from the rotated frame of the values, and the output gate.

Reference: `kv.rotation.fast_hadamard`, the centre added, `sigmoid(gate) output`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.ops.cuda.compiler import kernel

WARPS = 8


class FinishArguments(ctypes.Structure):
    """The twin of `Finish` in attention_finish.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("centre", "gate", "y")),
        *((name, ctypes.c_int) for name in ("gate_stride", "y_stride")),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("o", ctypes.c_void_p),
        ("finish", FinishArguments),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "group", "pad")),
    ]


@dataclass(frozen=True)
class Finish:
    """What becomes of an attention output o: sigmoid(gate) (H o / sqrt(D) + centre), into y.

    y_TQD: fp16 or bf16, contiguous over heads and dims. turn_back: apply the Hadamard matrix. centre_KD: float32
    [kv_heads, D], or None. gate_TI: [T, heads D] of y's dtype, rows contiguous, or None.
    """

    y_TQD: Tensor
    turn_back: bool = True
    centre_KD: Tensor | None = None
    gate_TI: Tensor | None = None

    def arguments(self) -> FinishArguments:
        made = FinishArguments(centre=address(self.centre_KD), gate=address(self.gate_TI), y=self.y_TQD.data_ptr())
        made.y_stride = self.y_TQD.stride(0)
        if self.gate_TI is not None:
            made.gate_stride = self.gate_TI.stride(0)
        return made

    def defines(self) -> tuple[str, ...]:
        return (f"TURN={int(self.turn_back)}", *(("BF16",) if self.y_TQD.dtype == torch.bfloat16 else ()))

    def __call__(self, o_TQD: Tensor) -> None:
        """o_TQD: fp16, contiguous."""
        tokens, heads, dim = o_TQD.shape
        group = heads if self.centre_KD is None else heads // len(self.centre_KD)
        launch = _Launch(o=o_TQD.data_ptr(), finish=self.arguments(), tokens=tokens, heads=heads, group=group)
        run = kernel("attention_finish", 32 * WARPS, (f"DIM={dim}", *self.defines()), o_TQD.device.index)
        run.launch((-(-tokens * heads // WARPS), 1), launch, dependent=True)


def address(tensor: Tensor | None) -> int:
    """Of the first element on the device; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
