"""Safetensors files: the header as records, and tensors read straight into their destination.

The mapping of whole files that the safetensors package uses counts into a process's memory until pages are dropped;
positional reads do not, so loading never needs more than the tensors asked for plus one buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kakera.arch.stored import TensorHeader, read_headers, stored_headers
from kakera.errors import CheckpointError
from kakera.target.as_torch import target_of

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
BUFFER_BYTES = 16 << 20  # of one read; large enough for full disk speed, small beside any model


@dataclass(frozen=True)
class StoredTensor(TensorHeader):
    """One tensor of one file, which can be read."""

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{self}: dtype {self.dtype} is not supported")
        return DTYPES[self.dtype]

    def read(self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Tensor:
        """See `read_tensor`. Made-up weights (`kakera.weights.synthetic`) override this."""
        return read_tensor(self, dtype, device)


def read_header(path: Path) -> list[StoredTensor]:
    """All tensors of a file. Raises CheckpointError if the file is missing, truncated or malformed."""
    return [StoredTensor(**vars(header)) for header in read_headers(path)]


def stored_tensors(directory: Path, beside: Iterable[str]) -> list[StoredTensor]:
    """All tensors of a model directory, as `arch.stored.stored_headers` lists them. Raises CheckpointError."""
    return [StoredTensor(**vars(header)) for header in stored_headers(directory, beside)]


def read_tensor(
    stored: StoredTensor, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", *, finite: bool = True
) -> Tensor:
    """The tensor in its stored shape, converted to `dtype` (None: as stored) while it is read.

    Raises CheckpointError if the file ends early, or (with `finite`) on a NaN or infinity.
    """
    source = stored.torch_dtype
    result = torch.empty(stored.shape, dtype=dtype or source, device=device)
    flat = result.view(-1)
    step = BUFFER_BYTES // source.itemsize
    direct = result.dtype == source and target_of(result.device).one_memory
    buffer = None if direct else torch.empty(min(step, flat.numel()), dtype=source)
    descriptor = os.open(stored.path, os.O_RDONLY)
    try:
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            raw = part if buffer is None else buffer[: part.numel()]
            _fill(descriptor, raw, stored, stored.offset + start * source.itemsize)
            if finite and source.is_floating_point and not torch.isfinite(raw).all():
                raise CheckpointError(f"{stored} contains NaN or infinity: the file is damaged")
            if buffer is not None:
                part.copy_(raw)
    finally:
        os.close(descriptor)
    return result


def _fill(descriptor: int, raw: Tensor, stored: StoredTensor, offset: int) -> None:
    if raw.numel() == 0:
        return
    view = memoryview(raw.view(torch.uint8).numpy().data)
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{stored}: the file ends {len(view) - done} bytes too early")
        done += count
