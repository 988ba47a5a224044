"""The best tail-biting path through the trellis for a tile of 256 weights: the encoder's inner search.

Tail-biting (the first state continues the last one) is found in two passes, as the EXL3 quantiser does: an
unconstrained pass over the tile rolled by half, to learn the state at the seam, then the real order with both ends
fixed to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kakera.ops.codec.trellis import WEIGHTS
from kakera.quantize.viterbi import search_torch
from kakera.target.as_torch import target_of

HALF = WEIGHTS // 2
Search = Callable[[Tensor, Tensor | None, Tensor, int], Tensor]
"""(targets fp32 [tiles, 256], seam int32 [tiles] or None, codebook fp32 [65536], bits) -> states int32 [tiles, 256]."""


def encode(targets: Tensor, table: Tensor, bits: int, search: Search | None = None) -> Tensor:
    """States int32 [tiles, 256] whose values are the nearest tail-biting path to targets [tiles, 256] (stream order).

    `table` holds the 65,536 codebook values in fp32. `search` defaults to the Triton kernel on CUDA where Triton is
    importable, else to `search_torch`.
    """
    search = search or _best_search(targets.device)
    rolled = search(targets.roll(-HALF, -1).contiguous(), None, table, bits)
    return search(targets.contiguous(), rolled[:, HALF] >> bits, table, bits)


def _best_search(device: torch.device) -> Search:
    if not target_of(device).has_cards:
        return search_torch
    try:
        from kakera.quantize.viterbi_triton import search_triton
    except ImportError:
        return search_torch
    return search_triton
