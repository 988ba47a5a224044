"""Safetensors files: the header as records, and tensors read straight into their destination.

The mapping of whole files that the safetensors package uses counts into a process's memory until pages are dropped;
positional reads do not, so loading never needs more than the tensors asked for plus one buffer.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
HEADER_LIMIT = 100 << 20  # the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of one file. `name` is the name in the file, `offset` counts from the start of the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{self}: dtype {self.dtype} is not supported")
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"tensor {self.name} in {self.path}"

    def read(self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Tensor:
        """See `read_tensor`. Made-up weights (`kakera.weights.synthetic`) override this."""
        return read_tensor(self, dtype, device)


def read_header(path: Path) -> list[StoredTensor]:
    """Records of all tensors of a file. Raises CheckpointError if the file is missing, truncated or malformed."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise CheckpointError(f"{path} is truncated or no safetensors file: {size} bytes, header of {length}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            records = [_record(path, name, item, 8 + length) for name, item in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: malformed safetensors header ({error!r})") from None
    for record in records:
        if record.offset + record.bytes > size:
            raise CheckpointError(
                f"{record} ends at byte {record.offset + record.bytes}, the file at {size}: truncated"
            )
    return records


def _record(path: Path, name: str, item: dict[str, Any], base: int) -> StoredTensor:
    begin, end = item["data_offsets"]
    record = StoredTensor(name, path, item["dtype"], tuple(item["shape"]), base + begin, end - begin)
    if record.dtype in DTYPES and record.bytes != math.prod(record.shape) * record.torch_dtype.itemsize:
        raise ValueError(f"{name}: {record.bytes} bytes for {record.dtype} {list(record.shape)}")
    return record


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
