"""Rows of a table that lies in host memory, looked up by a kernel that reads them there (`cuda/host_rows.cu`): in a
graph, in prefill, in any order. Of 1.3 GB a step reads a few kilobytes, so the table need not take a card's memory.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from kakera.errors import KakeraError
from kakera.ops import mapped
from kakera.ops.cuda.compiler import kernel
from kakera.ops.int8 import int8_rows
from kakera.target.as_torch import name_of
from kakera.target.kernels import serves_host_rows

THREADS = 256


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "scale", "tokens", "y")),
        *((name, ctypes.c_int) for name in ("channels", "vocabulary")),
    ]


def host_rows_reference(rows_VH: Tensor, scale_V: Tensor | None, tokens_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows tokens_T of the table, [T, H] in `dtype`. All tensors on one device."""
    return rows_VH[tokens_T].to(dtype) if scale_V is None else int8_rows(rows_VH, scale_V, tokens_T, dtype)


class HostRows:
    """A table in host memory, and where a card sees it. rows_VH: int8 with scale_V float16, or values in `dtype` and no
    scale; both on the CPU. `dtype`: of the looked-up rows, float16 or bfloat16. Scales, half a megabyte, go to the
    device: what is registered must not share a page with anything else that is.

    Raises KakeraError if the memory can not be pinned, ValueError for what the kernel does not take.
    """

    def __init__(self, rows_VH: Tensor, scale_V: Tensor | None, dtype: torch.dtype, device: torch.device):
        if not serves_host_rows(rows_VH.shape[1], name_of(dtype)):
            raise ValueError(f"rows of {rows_VH.shape[1]} values in {dtype} can not be read from the host")
        if rows_VH.dtype != (dtype if scale_V is None else torch.int8):
            raise ValueError(f"rows in {rows_VH.dtype} with{'out' * (scale_V is None)} scales, looked up in {dtype}")
        self._rows_VH = rows_VH.contiguous()
        self._scale_V = None if scale_V is None else scale_V.to(device, torch.float16).contiguous()
        self.dtype, self.device = dtype, torch.empty(0, device=device).device  # which cuda it is
        self._launch = _Launch(channels=rows_VH.shape[1], vocabulary=len(rows_VH))
        try:
            with torch.cuda.device(device):
                self._launch.rows = mapped.register(self._rows_VH.data_ptr(), self._rows_VH.nbytes)
        except KakeraError as error:
            raise KakeraError(f"--embedding host: {error}; --embedding device keeps it on the card") from None
        # until this table is gone, which is before its memory is
        weakref.finalize(self, mapped.unregister, self._rows_VH.data_ptr()).atexit = False
        coded = () if scale_V is None else ("CODED",)
        self._defines = coded + (("BF16",) if dtype == torch.bfloat16 else ())

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """[T, H] on the device, of ids there; ids that the table does not have give its last row or its first."""
        tokens_T = tokens_T.long().contiguous()
        y_TH = torch.empty(len(tokens_T), self._launch.channels, dtype=self.dtype, device=tokens_T.device)
        if len(tokens_T):
            self._launch.tokens, self._launch.y = tokens_T.data_ptr(), y_TH.data_ptr()
            self._launch.scale = None if self._scale_V is None else self._scale_V.data_ptr()
            kernel("host_rows", THREADS, self._defines, y_TH.device.index).launch((len(tokens_T), 1), self._launch)
        return y_TH
