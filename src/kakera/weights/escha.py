"""Escha linears: `escha_code`, `escha_rin`, `escha_rout`, optional `escha_s_in`, `escha_s_out`, `escha_config`, `bias`.

An EXL3 linear under other names, always with the mcg codebook, with extra fp32 scales near 1. Only 2 and 3 bits exist.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.arch.tensors import Cut
from kakera.errors import CheckpointError
from kakera.ops.codec.coded import CodedLinear
from kakera.weights.exl3 import code_bits, coded_shape
from kakera.weights.leaves import Leaves

MARK = "escha_code"
LEAVES = (MARK, "escha_rin", "escha_rout", "escha_s_in", "escha_s_out", "escha_config")
BITS = (2, 3)
FLOATS = (torch.float16, torch.float32)


def shape(leaves: Leaves) -> tuple[int, ...]:
    leaves.refuse_unknown(LEAVES, prefix="escha_")
    return coded_shape(leaves, MARK)


def read_coded(
    leaves: Leaves, out_channels: int, in_channels: int, device: str | torch.device, cut: Cut | None = None
) -> CodedLinear:
    """The coded linear, or a rank's part of it, with the extra scales folded in fp32 (folding in fp16 would cost one
    more rounding)."""
    leaves.refuse_unknown(LEAVES, prefix="escha_")
    bits = code_bits(leaves, MARK, out_channels, in_channels)
    if bits not in BITS:
        raise CheckpointError(f"{leaves[MARK]} has {bits:g} bits a weight; Escha files have 2 or 3")
    check_config(leaves, int(bits), out_channels, in_channels)
    code = leaves.read(MARK, leaves[MARK].shape, None, device, stored_as=(torch.int16,), cut=cut)
    rin = _folded(leaves, ("escha_rin", "escha_s_in"), in_channels, device, cut)
    rout = _folded(leaves, ("escha_rout", "escha_s_out"), out_channels, device, cut)
    return CodedLinear(code, rin, rout, "mcg")


def _folded(
    leaves: Leaves, names: tuple[str, str], channels: int, device: str | torch.device, cut: Cut | None
) -> Tensor:
    """The scale of one side, times the extra one if it is there."""
    scale, extra = names
    folded = leaves.read(scale, (channels,), torch.float32, device, stored_as=FLOATS, cut=cut)
    if extra in leaves:
        folded *= leaves.read(extra, (channels,), torch.float32, device, stored_as=FLOATS, cut=cut)
    return folded


def descriptor(bits: int, outputs: int, inputs: int, experts: int = 0) -> tuple[int, ...]:
    """`escha_config`: state bits, K, V, codebook (1 = mcg), I, O; V is 2 in all known files and means nothing to a
    decoder. Of a stack of `experts` their number stands before I and O, which come again as they were padded."""
    sizes = (inputs, outputs)
    return (16, bits, 2, 1, experts, *sizes, *sizes) if experts else (16, bits, 2, 1, *sizes)


def check_config(leaves: Leaves, bits: int, out_channels: int, in_channels: int, experts: int = 0) -> None:
    """Raise CheckpointError for a descriptor of another codec, or of other sizes."""
    if "escha_config" not in leaves:
        return
    stored = leaves["escha_config"]
    found, expected = stored.read().flatten().tolist(), list(descriptor(bits, out_channels, in_channels, experts))
    if found != expected:
        raise CheckpointError(f"{stored} is {found}, expected {expected}: another codec than the one known here")


def read(
    leaves: Leaves,
    out_channels: int,
    in_channels: int,
    dtype: torch.dtype,
    device: str | torch.device,
    cut: Cut | None = None,
) -> Tensor:
    """Weight [O, I], decoded, or a rank's part of it."""
    return read_coded(leaves, out_channels, in_channels, device, cut).weight(dtype)
