"""The most likely tokens of each row, in an order that no batch, device or kernel changes: equals by lower id."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE_ROWS = 8  # rows ranked at a time: at most 4 float32 copies of them are alive, 32 MB for 248,320 tokens


def in_pieces(rows_S: Tensor, size: int = PIECE_ROWS) -> Sequence[Tensor]:
    """Views of at most `size` entries of the first dimension; none of no rows."""
    return [rows_S[begin : begin + size] for begin in range(0, len(rows_S), size)]


def top_ids(logits_PV: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest values of each row, largest first: int64 [P, count].

    `topk` leaves open which of several equal values it takes, and logits that were 16-bit numbers have many. So it
    gets 64-bit keys, none of which are equal: the value's bits in an order that integers have, then the id.
    NaN comes first, as everywhere in torch. Makes every zero of `logits_PV` positive, so that there is only one.
    """
    vocabulary = logits_PV.shape[-1]
    bits_PV = logits_PV.add_(0.0).view(torch.int32)
    keys_PV = (bits_PV >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits_PV).long()
    last_first_V = torch.arange(vocabulary - 1, -1, -1, dtype=torch.int32, device=logits_PV.device)
    keys_PV.bitwise_left_shift_(32).add_(last_first_V)
    return vocabulary - 1 - keys_PV.topk(count).values.bitwise_and_(0xFFFFFFFF)
