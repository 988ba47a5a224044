"""Bytes between host and device without a wait: many small arrays up in one copy, results down behind an event."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kakera.target.as_torch import target_of

ALIGNED = 8  # bytes; a view as int64 or float64 has to begin on a multiple of it


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors of one buffer on `device`. A GPU gets them in one asynchronous copy from pinned memory."""
    begins, size = [], 0
    for array in arrays.values():
        begins.append(size)
        size += -(-array.nbytes // ALIGNED) * ALIGNED
    host_B = torch.empty(size, dtype=torch.uint8, pin_memory=target_of(device).has_cards)
    for array, begin in zip(arrays.values(), begins, strict=True):
        host_B[begin : begin + array.nbytes].numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    device_B = host_B.to(device, non_blocking=True)
    return {
        name: device_B[begin : begin + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for (name, array), begin in zip(arrays.items(), begins, strict=True)
    }


class Download:
    """A device tensor on its way to the host. `wait` waits for this copy, not for what was queued behind it."""

    def __init__(self, tensor: Tensor):
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host


_DTYPES = {
    "uint8": torch.uint8,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}
