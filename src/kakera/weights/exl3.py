"""EXL3 linears: `trellis`, `suh`, `svh`, a flag tensor `mcg` or `mul1` for the codebook, optionally `bias`.

Neither flag means the 3inst codebook. Older files store bare signs `su`, `sv`: one bit a channel, packed in int16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.errors import CheckpointError
from kakera.ops.codec import codebook
from kakera.ops.codec.coded import CodedLinear
from kakera.weights.leaves import Leaves

MARK = "trellis"
LEAVES = (MARK, "suh", "svh", "su", "sv", "mcg", "mul1", "bias")
SCALE_DTYPES = (torch.float16, torch.float32)


def shape(leaves: Leaves) -> tuple[int, ...]:
    leaves.refuse_unknown(LEAVES)
    rows, columns, _ = leaves[MARK].shape
    return 16 * columns, 16 * rows


def code_bits(leaves: Leaves, leaf: str, out_channels: int, in_channels: int) -> int:
    """K of a code tensor [I/16, O/16, 16K], after checking its shape against the linear's."""
    stored = leaves[leaf]
    if in_channels % 128 or out_channels % 128:
        raise CheckpointError(f"{stored}: [{out_channels}, {in_channels}] is no multiple of the codec's blocks of 128")
    fits = len(stored.shape) == 3 and stored.shape[:2] == (in_channels // 16, out_channels // 16)
    if not fits or stored.shape[2] % 16 or not 1 <= stored.shape[2] // 16 <= 8:
        expected = f"[{in_channels // 16}, {out_channels // 16}, 16 x bits]"
        raise CheckpointError(f"{stored} has shape {list(stored.shape)}, the model needs {expected}")
    return stored.shape[2] // 16


def read_coded(leaves: Leaves, out_channels: int, in_channels: int, device: str | torch.device) -> CodedLinear:
    """The linear as it is coded."""
    leaves.refuse_unknown(LEAVES)
    code_bits(leaves, MARK, out_channels, in_channels)
    code = leaves.read(MARK, leaves[MARK].shape, None, device, stored_as=(torch.int16,))
    in_scale = _scale(leaves, "suh", "su", in_channels, device)
    out_scale = _scale(leaves, "svh", "sv", out_channels, device)
    return CodedLinear(code, in_scale, out_scale, _codebook(leaves))


def _codebook(leaves: Leaves) -> codebook.Name:
    if "mcg" in leaves and "mul1" in leaves:
        raise CheckpointError(f"{leaves['mcg']} and mul1 are both present: only one codebook can apply")
    return "mcg" if "mcg" in leaves else "mul1" if "mul1" in leaves else "3inst"


def _scale(leaves: Leaves, scales: str, signs: str, channels: int, device: str | torch.device) -> Tensor:
    if scales in leaves or signs not in leaves:
        return leaves.read(scales, (channels,), torch.float32, device, stored_as=SCALE_DTYPES)
    packed = leaves.read(signs, (channels // 16,), torch.int32, device, stored_as=(torch.int16,))
    bits = (packed[:, None] >> torch.arange(16, device=packed.device)) & 1
    return (1 - 2 * bits).flatten().float()


def read(leaves: Leaves, out_channels: int, in_channels: int, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """Weight [O, I], decoded."""
    return read_coded(leaves, out_channels, in_channels, device).weight(dtype)
