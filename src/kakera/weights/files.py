"""Safetensors files: the header as records, and tensors read straight into their destination.

The mapping of whole files that the safetensors package uses counts into a process's memory until pages are dropped;
positional reads do not, so loading never needs more than the tensors asked for plus one buffer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kakera.arch.stored import TensorHeader, read_headers, stored_headers
from kakera.arch.tensors import Cut
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

    def read(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", cut: Cut | None = None
    ) -> Tensor:
        """See `read_tensor`. Made-up weights (`kakera.weights.synthetic`) override this."""
        return read_tensor(self, dtype, device, cut=cut)

    def piece(self, number: int) -> Self:
        """What stands at `number` of the first axis."""
        size = self.bytes // self.shape[0]
        name, offset = f"{self.name}[{number}]", self.offset + number * size
        return replace(self, name=name, shape=self.shape[1:], offset=offset, bytes=size)


def read_header(path: Path) -> list[StoredTensor]:
    """All tensors of a file. Raises CheckpointError if the file is missing, truncated or malformed."""
    return [StoredTensor(**vars(header)) for header in read_headers(path)]


def stored_tensors(directory: Path, beside: Iterable[str]) -> list[StoredTensor]:
    """All tensors of a model directory, as `arch.stored.stored_headers` lists them. Raises CheckpointError."""
    return [StoredTensor(**vars(header)) for header in stored_headers(directory, beside)]


def read_tensor(
    stored: StoredTensor,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    finite: bool = True,
    cut: Cut | None = None,
) -> Tensor:
    """The tensor in its stored shape, or the part of it that a rank holds, converted to `dtype` (None: as stored) while
    it is read. Of the rest nothing is read.

    Raises CheckpointError if the file ends early, or (with `finite`) on a NaN or infinity.
    """
    source = stored.torch_dtype
    shape = stored.shape if cut is None else cut.shape(stored.shape)
    result = torch.empty(shape, dtype=dtype or source, device=device)
    flat = result.view(-1)
    step = BUFFER_BYTES // source.itemsize
    direct = result.dtype == source and target_of(result.device).one_memory
    buffer = None if direct else torch.empty(min(step, flat.numel()), dtype=source)
    descriptor = os.open(stored.path, os.O_RDONLY)
    try:
        done = 0
        for runs in _pieces(_runs(stored.shape, cut), step):
            part = flat[done : done + sum(count for _, count in runs)]
            raw = part if buffer is None else buffer[: part.numel()]
            filled = 0
            for first, count in runs:
                _fill(descriptor, raw[filled : filled + count], stored, stored.offset + first * source.itemsize)
                filled += count
            if finite and source.is_floating_point and not torch.isfinite(raw).all():
                raise CheckpointError(f"{stored} contains NaN or infinity: the file is damaged")
            if buffer is not None:
                part.copy_(raw)
            done += filled
    finally:
        os.close(descriptor)
    return result


def part_of(whole: Tensor, cut: Cut) -> Tensor:
    """The part of a tensor that is there."""
    return torch.cat([whole.narrow(cut.axis, begin, end - begin) for begin, end in cut.ranges], dim=cut.axis)


def _runs(shape: tuple[int, ...], cut: Cut | None) -> Iterator[tuple[int, int]]:
    """(first value, values) that lie together in the file, in the order in which they lie in the part."""
    if cut is None:
        yield 0, math.prod(shape)
        return
    inner, size = math.prod(shape[cut.axis + 1 :]), shape[cut.axis]
    for outer in range(math.prod(shape[: cut.axis])):
        for begin, end in cut.ranges:
            yield (outer * size + begin) * inner, (end - begin) * inner


def _pieces(runs: Iterable[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """The runs in pieces of `most` values, cut where they are longer; only the last piece is shorter."""
    piece: list[tuple[int, int]] = []
    room = most
    for first, count in runs:
        while count:
            taken = min(count, room)
            piece.append((first, taken))
            first, count, room = first + taken, count - taken, room - taken
            if room == 0:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


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
