"""Trellis-coded linears on NVIDIA GPUs: y = x W, W staying coded. Reference: `CodedLinear.forward`.

Up to FEW_ROWS rows: the codes are decoded inside the product, in registers; a wider batch takes several passes, until
decoding W once to 16 bit and a library's product are faster (MANY_ROWS). docs/developers/performance/trellis.md has
the numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.ops.codec.coded import CodedLinear
from kakera.ops.cuda.compiler import Kernel, kernel
from kakera.target.as_torch import HALVES

FEW_ROWS = 32
MANY_ROWS = 65  # three passes of 32 rows take as long as decoding once, and twice the launches
PARTS = 4  # linears of a launch
WARPS = 8
STEP = 64  # input channels of a warp's step
COST = {1: 8, 1.5: 8, 2: 7, 2.5: 8, 3: 8, 3.5: 8, 4: 7, 5: 8, 6: 8, 7: 8, 8: 7}  # of a unit by bits: instructions
BLOCK = 128
BLOCKS_PER_SM = 2  # of trellis_few.cu
MASK = 0x8FFF8FFF  # of the codebook; an argument, because the compiler makes two instructions of a known one
CODEBOOKS = {"mcg": "MCG", "3inst": "INST3", "mul1": "MUL1"}


class _Part(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("code", "x", "out_scale", "y")),
        *((name, ctypes.c_int) for name in ("tiles", "rate", "row_stride", "cost", "cost_before", "pad")),
    ]


class _Few(ctypes.Structure):
    _fields_ = [
        ("parts", _Part * PARTS),
        *((name, ctypes.c_int) for name in ("rows", "inputs", "count", "cost")),
        *((name, ctypes.c_uint) for name in ("mask", "pad")),
        *((name, ctypes.c_void_p) for name in ("partial", "arrived")),
    ]


class _Rotate(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("in_scale", ctypes.c_void_p * PARTS),
        ("to", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "inputs", "row_stride", "pad")),
    ]


class _Weight(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("code", "in_scale", "out_scale", "to")),
        *((name, ctypes.c_int) for name in ("tiles", "row_stride")),
        *((name, ctypes.c_uint) for name in ("mask", "pad")),
    ]


@dataclass(frozen=True)
class TrellisScratch:
    """Memory that the linears of a device share, one after the other on one stream; independent of the batch.

    partial: fp32, sums of column blocks that several thread blocks share. arrived: counters, 0 between launches.
    rotated: fp16 [PARTS * FEW_ROWS * widest input]. weight: 16-bit weights of the piece being multiplied, bytes.
    """

    partial: Tensor
    arrived: Tensor
    rotated: Tensor
    weight: Tensor

    @staticmethod
    def allocate(shapes: Iterable[tuple[int, int]], weight_bytes: int, device: torch.device) -> TrellisScratch:
        """As much as linears of these shapes (outputs, inputs) need, PARTS of them in a launch at most.

        `weight_bytes`: for 16-bit weights; a wider matrix is decoded in pieces, of 128 output channels at least.
        """
        shapes = list(shapes)
        widest, tiles = max(i for _, i in shapes), PARTS * max(o for o, _ in shapes) // BLOCK
        return TrellisScratch(
            partial=torch.empty(2 * _blocks(device) * FEW_ROWS * BLOCK, dtype=torch.float32, device=device),
            arrived=torch.zeros(tiles * FEW_ROWS, dtype=torch.int32, device=device),
            rotated=torch.empty(PARTS * FEW_ROWS * widest, dtype=torch.float16, device=device),
            weight=torch.empty(max(weight_bytes, 2 * widest * BLOCK), dtype=torch.uint8, device=device),
        )


@dataclass(frozen=True)
class TrellisLinear:
    """Linears that read the same input, at most PARTS, in one launch. (A chosen expert of a stack is such a part.)

    All on one CUDA device, with one codebook, bits may differ. Channels are multiples of 128. Raises ValueError.
    """

    parts: tuple[CodedLinear, ...]

    def __post_init__(self) -> None:
        alike = {(part.in_channels, part.codebook) for part in self.parts}
        odd = [n for part in self.parts for n in (part.in_channels, part.out_channels) if n % BLOCK]
        if not 1 <= len(self.parts) <= PARTS or len(alike) != 1 or odd:
            shapes = ", ".join(f"{p.in_channels} -> {p.out_channels} {p.codebook}" for p in self.parts)
            raise ValueError(
                f"a launch takes 1 to {PARTS} linears of one input and one codebook, in blocks of {BLOCK}: not {shapes}"
            )

    @property
    def in_channels(self) -> int:
        return self.parts[0].in_channels

    @property
    def out_channels(self) -> int:
        return sum(part.out_channels for part in self.parts)

    def __call__(self, x_TI: Tensor, scratch: TrellisScratch) -> tuple[Tensor, ...]:
        """For each part [T, O] in x's dtype, float16 or bfloat16; rows of x contiguous."""
        y_PTO = tuple(x_TI.new_empty(len(x_TI), part.out_channels) for part in self.parts)
        self.into(x_TI, y_PTO, scratch)
        return y_PTO

    def into(self, x_TI: Tensor, y_PTO: Sequence[Tensor], scratch: TrellisScratch) -> None:
        """The same into tensors that are there, by the way that is faster for so many rows."""
        if x_TI.dtype not in HALVES:  # a kernel would read other bytes as fp16
            raise ValueError(f"coded linears take float16 or bfloat16, not {x_TI.dtype}")
        if len(x_TI) >= MANY_ROWS:
            self.many(x_TI, y_PTO, scratch)
            return
        for start in range(0, len(x_TI), FEW_ROWS):
            rows = slice(start, start + FEW_ROWS)
            self.few(x_TI[rows], [y_TO[rows] for y_TO in y_PTO], scratch)

    def few(self, x_TI: Tensor, y_PTO: Sequence[Tensor], scratch: TrellisScratch) -> None:
        """At most FEW_ROWS rows: two launches, rotate the input for each part, then decode and multiply."""
        rows, inputs = x_TI.shape
        self._rotate(x_TI, scratch)
        groups = 1 if rows <= 8 else 2 if rows <= 16 else 4
        launch = _Few(rows=rows, inputs=inputs, count=len(self.parts), mask=MASK)
        launch.partial, launch.arrived = scratch.partial.data_ptr(), scratch.arrived.data_ptr()
        for i, (part, y_TO) in enumerate(zip(self.parts, y_PTO, strict=True)):
            launch.parts[i] = _Part(
                code=part.code.data_ptr(),
                x=scratch.rotated.data_ptr() + 2 * i * rows * inputs,
                out_scale=part.out_scale.data_ptr(),
                y=y_TO.data_ptr(),
                tiles=part.out_channels // BLOCK,
                rate=part.half_bits,
                row_stride=y_TO.stride(0),
                cost=COST[part.bits],
                cost_before=launch.cost,
            )
            launch.cost += COST[part.bits] * (part.out_channels // BLOCK) * (inputs // STEP)
        rates = " ".join(f"X({rate})" for rate in sorted({part.half_bits for part in self.parts}))
        defines = (f"GROUPS={groups}", f"CODEBOOK={CODEBOOKS[self.parts[0].codebook]}", f"EACH_RATE={rates}")
        function = _kernel("trellis_few", 32 * WARPS, defines, x_TI)
        largest = max(COST[part.bits] for part in self.parts)
        function.launch((min(launch.cost // largest, _blocks(x_TI.device)), 1), launch, dependent=True)

    def many(self, x_TI: Tensor, y_PTO: Sequence[Tensor], scratch: TrellisScratch) -> None:
        """Any number of rows: W to 16 bit, in pieces of columns if scratch is short, and a library's product."""
        width = len(scratch.weight) // 2 // self.in_channels // BLOCK * BLOCK
        for part, y_TO in zip(self.parts, y_PTO, strict=True):
            for first, count in _cut(part.out_channels // BLOCK, -(-part.out_channels // width)):
                weight_IO = scratch.weight.view(x_TI.dtype)[: count * self.in_channels].view(self.in_channels, count)
                decode_weight(part, first, weight_IO)
                torch.mm(x_TI, weight_IO, out=y_TO[:, first : first + count])

    def _rotate(self, x_TI: Tensor, scratch: TrellisScratch) -> None:
        rows, inputs = x_TI.shape
        launch = _Rotate(rows=rows, inputs=inputs, row_stride=x_TI.stride(0))
        launch.x, launch.to = x_TI.data_ptr(), scratch.rotated.data_ptr()
        for i, part in enumerate(self.parts):
            launch.in_scale[i] = part.in_scale.data_ptr()
        blocks = -(-rows * inputs // BLOCK // 4)
        _kernel("rotate", 128, (), x_TI).launch((blocks, len(self.parts)), launch, dependent=True)


def decode_weight(part: CodedLinear, first: int, weight_IO: Tensor) -> None:
    """W_eff of the output channels first, first + 1, ... into weight_IO [I, O'], in its dtype."""
    inputs, count = weight_IO.shape
    launch = _Weight(tiles=part.out_channels // 16, row_stride=weight_IO.stride(0), mask=MASK)
    launch.code = part.code.data_ptr() + first // 16 * 16 * part.half_bits
    launch.in_scale, launch.out_scale = part.in_scale.data_ptr(), part.out_scale.data_ptr() + 4 * first
    launch.to = weight_IO.data_ptr()
    defines = (f"CODEBOOK={CODEBOOKS[part.codebook]}", f"RATE={part.half_bits}")
    _kernel("trellis_weight", 256, defines, weight_IO).launch((count // BLOCK, inputs // BLOCK), launch)


def _kernel(name: str, threads: int, defines: tuple[str, ...], like: Tensor) -> Kernel:
    if like.dtype == torch.bfloat16:
        defines = (*defines, "BF16")
    return kernel(name, threads, defines, like.device.index)


def _cut(blocks: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Channels of `pieces` runs of blocks, as equal as can be: (first, count)."""
    for i in range(pieces):
        first, end = blocks * i // pieces, blocks * (i + 1) // pieces
        yield first * BLOCK, (end - first) * BLOCK


def _blocks(device: torch.device) -> int:
    return BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
