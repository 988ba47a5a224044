"""The trellis bit stream of a 16 x 16 tile (the EXL3 tile layout): states to bits and back, for 1 to 8 bits a weight.

A tile owns 16K int16. Read as little-endian 32-bit words, most significant bit first, they are a cyclic stream of 256K
bits; the state of weight i is the 16 bits in front of bit floor((i+1)K). So K new bits per weight shift into a 16-bit
state, and the first states take their high bits from the end of the stream (tail-biting: no start state is stored).
Where K has a half, weights take K - 1/2 and K + 1/2 bits in turn, and the stream still is one of whole words.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

TILE = 16
WEIGHTS = TILE * TILE
STATE_BITS = 16


@functools.cache
def positions() -> tuple[Tensor, Tensor]:
    """(input row, output column) inside the tile of weight i = 0 .. 255: the m16n8k16 B-fragment order."""
    i = torch.arange(WEIGHTS)
    lane, j = i // 8, i % 8
    return 2 * (lane % 4) + (j & 1) + 8 * ((j >> 1) & 1), lane // 4 + 8 * (j >> 2)


def tiles_of(weight_IO: Tensor) -> Tensor:
    """Cut [I, O] into tiles in stream order: [I/16, O/16, 256]."""
    row, column = positions()
    rows, columns = weight_IO.shape[0] // TILE, weight_IO.shape[1] // TILE
    tiles = weight_IO.reshape(rows, TILE, columns, TILE).permute(0, 2, 1, 3).reshape(rows, columns, WEIGHTS)
    return tiles.index_select(2, (row * TILE + column).to(weight_IO.device))


def untile(tiles: Tensor) -> Tensor:
    """The inverse of `tiles_of`: [A, B, 256] in stream order to [16A, 16B]."""
    row, column = positions()
    order = torch.argsort(row * TILE + column).to(tiles.device)
    rows, columns, _ = tiles.shape
    grid = tiles.index_select(2, order).view(rows, columns, TILE, TILE)
    return grid.permute(0, 2, 1, 3).reshape(rows * TILE, columns * TILE)


def ends(bits: float) -> Tensor:
    """int64 [256]: bits of the stream up to the last one of weight i, which is where its state ends."""
    return torch.arange(1, WEIGHTS + 1) * round(2 * bits) // 2


def pack(states: Tensor, bits: float) -> Tensor:
    """Code int16 [..., 16K] of states [..., 256] in stream order (any integer dtype); the low bits of each count, as
    many as are new."""
    last = ends(bits)
    bit = torch.arange(int(last[-1]))
    weight = torch.searchsorted(last, bit, right=True)  # whose bit it is
    below = (last[weight] - 1 - bit).to(states.device)
    stream = (states.long().index_select(-1, weight.to(states.device)) >> below) & 1  # [..., 256K]
    places = torch.arange(15, -1, -1, device=states.device)
    halfwords = (stream.reshape(*states.shape[:-1], -1, 16) << places).sum(-1)
    return _swap_pairs(halfwords - ((halfwords >> 15) << 16)).to(torch.int16)


def decode(code: Tensor, table: Tensor) -> Tensor:
    """Weights of tiles: code int16 [A, B, 16K], table [65536] -> [16B, 16A], i.e. [O, I], in the table's dtype."""
    rows, columns, _ = code.shape
    window = _windows(code)
    halfword, shift = _selection(code.shape[-1], tile_order=True, device=code.device)
    states = window.index_select(-1, halfword)
    states = states.bitwise_right_shift_(shift).bitwise_and_(0xFFFF)
    values = table.index_select(0, states.view(-1)).view(rows, columns, TILE, TILE)  # [A, B, output, input]
    return values.permute(1, 2, 0, 3).reshape(columns * TILE, rows * TILE)


def unpack(code: Tensor) -> Tensor:
    """States int32 [..., 256] in stream order, of code int16 [..., 16K]."""
    halfword, shift = _selection(code.shape[-1], tile_order=False, device=code.device)
    return (_windows(code).index_select(-1, halfword) >> shift) & 0xFFFF


def _windows(code: Tensor) -> Tensor:
    """int32 [..., 16K]: each 16-bit piece of the stream with the piece before it in its high half (cyclic)."""
    stream = _swap_pairs(code).to(torch.int32) & 0xFFFF
    return (torch.roll(stream, 1, -1) << 16) | stream


def _swap_pairs(halfwords: Tensor) -> Tensor:
    """Stream order to storage order and back: the high half of a little-endian word is stored second."""
    return halfwords.reshape(*halfwords.shape[:-1], -1, 2).flip(-1).reshape(halfwords.shape)


@functools.cache
def _selection(halfwords: int, *, tile_order: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per weight of a tile of so many: which window holds its state, and how far to shift it down.

    In stream order, or ordered by (output column, input row) so that decoding needs no scatter.
    """
    last = ends(halfwords / TILE) - 1
    if tile_order:
        row, column = positions()
        last = last[torch.argsort(column * TILE + row)]
    return (last // 16).to(device), (15 - last % 16).to(torch.int32).to(device)
