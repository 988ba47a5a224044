"""EXL3 linears: `trellis`, `suh`, `svh`, a flag tensor `mcg` or `mul1` for the codebook, optionally `bias`.

Neither flag means the 3inst codebook. A flag holds the multiplier of its codebook; since October 2025 there is one for
each. Older files store bare signs `su`, `sv`: one bit a channel, packed in int16. Rates with a half exist of mul1 only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.arch.tensors import Cut
from kakera.errors import CheckpointError
from kakera.ops.codec import codebook
from kakera.ops.codec.coded import CodedLinear
from kakera.weights.leaves import Leaves

MARK = "trellis"
FLAGS: dict[codebook.Name, int] = {"mcg": codebook.MCG_MULTIPLIER, "mul1": codebook.MUL1_MULTIPLIER}
LEAVES = (MARK, "suh", "svh", "su", "sv", *FLAGS, "bias")
SCALE_DTYPES = (torch.float16, torch.float32)
FLAG_DTYPES = (torch.int32, torch.int64)
BARE_FLAGS = (0, 1)  # no multiplier of any codebook: only there
RATES, HALF_RATES = range(1, 9), (1.5, 2.5, 3.5)


def shape(leaves: Leaves) -> tuple[int, ...]:
    return _checked(leaves)


def coded_shape(leaves: Leaves, leaf: str) -> tuple[int, int]:
    """(O, I) of a linear by its code tensor [I/16, O/16, 16K]."""
    stored = leaves[leaf]
    if len(stored.shape) != 3:
        raise CheckpointError(f"{stored} has shape {list(stored.shape)}, not [inputs / 16, outputs / 16, 16 x bits]")
    return 16 * stored.shape[1], 16 * stored.shape[0]


def code_bits(leaves: Leaves, leaf: str, out_channels: int, in_channels: int) -> float:
    """K of a code tensor [I/16, O/16, 16K], after checking its shape against the linear's."""
    stored = leaves[leaf]
    if in_channels % 128 or out_channels % 128:
        raise CheckpointError(f"{stored}: [{out_channels}, {in_channels}] is no multiple of the codec's blocks of 128")
    if coded_shape(leaves, leaf) != (out_channels, in_channels):
        expected = f"[{in_channels // 16}, {out_channels // 16}, 16 x bits]"
        raise CheckpointError(f"{stored} has shape {list(stored.shape)}, the model needs {expected}")
    return stored.shape[2] / 16


def read_coded(
    leaves: Leaves, out_channels: int, in_channels: int, device: str | torch.device, cut: Cut | None = None
) -> CodedLinear:
    """The linear as it is coded, or a rank's part of it."""
    _checked(leaves)
    code_bits(leaves, MARK, out_channels, in_channels)
    code = leaves.read(MARK, leaves[MARK].shape, None, device, stored_as=(torch.int16,), cut=cut)
    in_scale = _scale(leaves, "suh", "su", in_channels, device, cut)
    out_scale = _scale(leaves, "svh", "sv", out_channels, device, cut)
    name = _codebook(leaves)
    _check_multiplier(leaves, name)
    return CodedLinear(code, in_scale, out_scale, name)


def _checked(leaves: Leaves) -> tuple[int, int]:
    """(O, I), after refusing what headers tell to be no linear that is known here."""
    if "signs" in leaves:
        raise CheckpointError(
            f"{leaves['signs']}: an embedding coded row by row (of exllamav3's --embed_bits) is not read; take a build "
            "whose embedding is in 16 bit"
        )
    leaves.refuse_unknown(LEAVES)
    stored, name, channels = leaves[MARK], _codebook(leaves), coded_shape(leaves, MARK)
    bits = stored.shape[2] / 16
    if bits in HALF_RATES and name != "mul1":
        raise CheckpointError(f"{stored} has {bits} bits a weight, which the codebook mul1 alone has; this is {name}")
    if bits not in RATES and bits not in HALF_RATES:
        raise CheckpointError(f"{stored} has {bits:g} bits a weight; EXL3 has 1 to 8, or 1.5, 2.5 or 3.5")
    return channels


def _codebook(leaves: Leaves) -> codebook.Name:
    """By what is there, whatever it holds."""
    if all(flag in leaves for flag in FLAGS):
        raise CheckpointError(f"{leaves['mcg']} and mul1 are both present: only one codebook can apply")
    return next((flag for flag in FLAGS if flag in leaves), "3inst")


def _check_multiplier(leaves: Leaves, name: codebook.Name) -> None:
    """Early files could be made with any multiplier, which decode to noise with ours."""
    if name not in FLAGS:
        return
    stored = leaves[name]
    values = leaves.read(name, stored.shape, torch.int64, stored_as=FLAG_DTYPES).flatten().tolist()
    if len(values) != 1 or values[0] & codebook.LOW32 not in (FLAGS[name], *BARE_FLAGS):
        found = f"0x{values[0] & codebook.LOW32:08X}" if len(values) == 1 else f"{len(values)} values"
        raise CheckpointError(f"{stored} holds {found}, another codebook than the one known here, 0x{FLAGS[name]:08X}")


def _scale(
    leaves: Leaves, scales: str, signs: str, channels: int, device: str | torch.device, cut: Cut | None
) -> Tensor:
    if scales in leaves or signs not in leaves:
        return leaves.read(scales, (channels,), torch.float32, device, stored_as=SCALE_DTYPES, cut=cut)
    packed = leaves.read(signs, (channels // 16,), torch.int32, device, stored_as=(torch.int16,), cut=cut)
    bits = (packed[:, None] >> torch.arange(16, device=packed.device)) & 1
    return (1 - 2 * bits).flatten().float()


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
