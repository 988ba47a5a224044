"""Attention of one span over paged keys: prefill by query pages, decode by tokens. Rotated frame, float32.

A query on page P reads pages max(0, P - R) .. P in 16 bit (the band) and what lies before from the pool, page 0 from
the sink (design rule "position decides precision"). Both paths are an online softmax: the band first, then history in
pieces cut at absolute positions. No cut and no matrix shape depends on the chunk or on other rows, so equal inputs
give equal bits however a prompt is chunked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.kv.plain.pages import PagePool
from kakera.kv.plain.softmax import OnlineSoftmax, PlainBlock
from kakera.kv.store import pages_to_rows

PREFILL_PIECE = 8  # pages; 512 keys run at 86 GFLOP/s a core, 1,024 at 67 (logits leave the 512 KiB L2)
# 4,096 tokens, three layers of 12/2 heads x 256, one busy AVX2 core: 12.8 ms a token with 32, 14.6 with 16, 18.0 with 8
DECODE_PIECE = 32  # pages


def attend_prefill(
    pool: PagePool,
    layer: int,
    table: Tensor,
    first: int,
    q_PBMD: Tensor,
    band_P2KND: Tensor,
    window_pages: int,
    sink_2KND: Tensor | None,
) -> Tensor:
    """Attention of the query pages first, first + 1, ...; returns [P, kv_heads, G * 64, D].

    q_PBMD: scaled queries, rows (head within the group, token). band_P2KND: rounded keys and values of the pages
    first - window_pages (or 0) .. last. sink_2KND: None if the pool itself is exact.
    """
    count = q_PBMD.shape[0]
    mask_MN = _causal_mask(q_PBMD.shape[2] // PAGE, q_PBMD.device)
    band_first = max(0, first - window_pages)
    lows = [max(0, first + i - window_pages) for i in range(count)]  # first page of each query page's band
    states = []
    for i, low in enumerate(lows):
        rows_2KND = pages_to_rows(band_P2KND[low - band_first : first + i + 1 - band_first])
        block = PlainBlock(rows_2KND, mask_MN)
        states.append(OnlineSoftmax(block.scores(q_PBMD[i]), block))
    # pages that every query page reads as history; there a GPU takes all rows at once, or launches would cost the most
    shared = lows[0] // PREFILL_PIECE * PREFILL_PIECE if q_PBMD.is_cuda else 0
    together = OnlineSoftmax.join(states) if shared else None
    q_BXD = q_PBMD.transpose(0, 1).flatten(1, 2)
    for start in range(0, lows[-1], PREFILL_PIECE):
        piece_2KND = pool.read(layer, table[start : min(start + PREFILL_PIECE, lows[-1])])
        if start == 0 and sink_2KND is not None:
            piece_2KND[:, :, :PAGE] = sink_2KND
        if together is not None and start < shared:
            block = PlainBlock(piece_2KND)
            together.add(block.scores(q_BXD), block)
            continue
        if together is not None:
            states, together = together.split(count), None
        for i, low in enumerate(lows):
            if low > start:
                block = PlainBlock(piece_2KND[:, :, : (low - start) * PAGE])
                states[i].add(block.scores(q_PBMD[i]), block)
    return torch.stack([state.result() for state in (together.split(count) if together else states)])


def attend_token(pool: PagePool, layer: int, history: Tensor, q_KGD: Tensor, recent_2KND: Tensor) -> Tensor:
    """Attention of one scaled query token over its 16-bit rows and the pages `history`; returns [kv_heads, G, D]."""
    recent = PlainBlock(recent_2KND)
    state = OnlineSoftmax(recent.scores(q_KGD), recent)
    if len(history):
        score = pool.scorer(q_KGD)
        for ids in torch.split(history, DECODE_PIECE):
            state.add(*score(layer, ids))
    return state.result()


def _causal_mask(group: int, device: torch.device) -> Tensor:
    """[G * 64, 64] added to the logits of a query page against itself."""
    mask = torch.full((PAGE, PAGE), float("-inf"), device=device).triu_(1)
    return mask.repeat(group, 1)
