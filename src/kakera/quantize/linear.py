"""Encode one linear: weight [O, I] in, CodedLinear and its relative error out."""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.ops.codec import codebook, trellis
from kakera.ops.codec.coded import CodedLinear
from kakera.ops.codec.hadamard import BLOCK
from kakera.quantize.transform import Encoder, Scales, channel_scales, search_scale, with_scale

CODEBOOK: codebook.Name = "mcg"  # the one that both formats read
BLOCK_WEIGHTS = 1 << 21  # 8,192 tiles at a time: fills a GPU, bounds temporaries to a few hundred MB
SAMPLE_TILES = 64


def encode_linear(weight_OI: Tensor, bits: int, seed: int, encode: Encoder) -> tuple[CodedLinear, float]:
    """Code a weight [O, I] (both multiples of 128; any float dtype) on its own device at `bits` per weight.

    Returns the coded linear, with scales that are exact in fp16, and |W - W_eff|^2 / |W|^2 (0 for an all-zero W).
    Deterministic for a given seed and device.
    """
    out_channels, in_channels = weight_OI.shape
    table = codebook.table(CODEBOOK, torch.float32, weight_OI.device)
    scales = channel_scales(weight_OI, torch.Generator().manual_seed(seed))
    scales = with_scale(scales, search_scale(_sample(weight_OI, scales), table, bits, encode))
    rows = max(1, BLOCK_WEIGHTS // (BLOCK * out_channels)) * BLOCK
    codes, error = [], 0.0
    for first in range(0, in_channels, rows):
        last = min(first + rows, in_channels)
        tiles = trellis.tiles_of(scales.target(weight_OI, first, last))
        states = encode(tiles.flatten(0, 1), bits)
        code = trellis.pack(states, bits).view(*tiles.shape[:2], -1)
        part = CodedLinear(code, scales.in_scale[first:last].float(), scales.out_scale.float(), CODEBOOK)
        power = weight_OI[:, first:last].float().square().sum().item()
        error += power * relative_error(part.weight(), weight_OI[:, first:last])
        codes.append(code)
    coded = CodedLinear(torch.cat(codes), scales.in_scale.float(), scales.out_scale.float(), CODEBOOK)
    return coded, error / (weight_OI.float().square().sum().item() or 1.0)


def relative_error(found_OI: Tensor, weight_OI: Tensor) -> float:
    """|W - Wq|^2 / |W|^2; 0 for an all-zero W."""
    return (found_OI - weight_OI).square().sum().item() / (weight_OI.float().square().sum().item() or 1.0)


def _sample(weight_OI: Tensor, scales: Scales) -> Tensor:
    """Tiles [n, 256] spread evenly over the matrix, at most 64 and at most a sixteenth of all."""
    out_channels, in_channels = weight_OI.shape
    blocks = in_channels // BLOCK
    wanted = max(4, min(SAMPLE_TILES, out_channels * in_channels // trellis.WEIGHTS // 16))
    chosen = sorted({round(i * (blocks - 1) / 7) for i in range(8)})
    per_block = -(-wanted // len(chosen))
    sample = []
    for block in chosen:
        tiles = trellis.tiles_of(scales.target(weight_OI, block * BLOCK, (block + 1) * BLOCK)).flatten(0, 1)
        sample.append(tiles[torch.linspace(0, len(tiles) - 1, per_block).long().to(tiles.device)])
    return torch.cat(sample)
