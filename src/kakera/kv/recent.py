"""The 16-bit sink page and window ring of each running request (int2 codec only).

Page p of a sequence lies at place p % (R + 2) of its slot's ring: R pages before the query's own, its own, and one
more that a row of several tokens may have entered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.kv.batch import CheckpointTensors, Span
from kakera.kv.codec import WINDOW_DTYPE
from kakera.plan.kv_format import KvFormat


class RecentStore:
    """ring: bf16 [L, S, R + 2, 2 (K, V), kv_heads, 64, D]; sink: bf16 [L, S, 2, kv_heads, 64, D]; rotated frame.

    window_pages: R; places: R + 2.
    """

    def __init__(self, spec: ModelSpec, fmt: KvFormat, slots: int, device: torch.device):
        self.window_pages = fmt.window_pages
        self.places = fmt.ring_pages
        layers, page = spec.kv_layers, (2, spec.kv_heads, PAGE, spec.head_dim)
        self.ring = torch.empty((layers, slots, self.places, *page), dtype=WINDOW_DTYPE, device=device)
        self.sink = torch.empty((layers, slots, *page), dtype=WINDOW_DTYPE, device=device)

    def write_pages(self, layer: int, slot: int, first: int, kv_P2KND: Tensor) -> None:
        """Keep the newest pages of a prefill segment whose first page is `first`, and page 0 as the sink."""
        kept_P2KND = kv_P2KND[-self.places :]
        last = first + kv_P2KND.shape[0] - 1
        self.ring[layer, slot, self.places_of(last - kept_P2KND.shape[0] + 1, last)] = kept_P2KND
        if first == 0:
            self.sink[layer, slot] = kv_P2KND[0]

    def write_token(self, layer: int, slot: int, position: int, kv_2KD: Tensor) -> None:
        page, offset = divmod(position, PAGE)
        self.ring[layer, slot, page % self.places, :, :, offset] = kv_2KD
        if page == 0:
            self.sink[layer, slot, :, :, offset] = kv_2KD

    def read_pages(self, layer: int, slot: int, first: int, last: int) -> Tensor:
        """A copy of the pages first .. last, [P, 2, kv_heads, 64, D] bf16; they must still be in the ring."""
        return self.ring[layer, slot, self.places_of(first, last)]

    def load_window(self, slot: int, checkpoint: CheckpointTensors) -> None:
        """Put the window of a checkpoint into the slot's ring: the R pages before `checkpoint.position`."""
        assert checkpoint.window_k is not None and checkpoint.window_v is not None
        for places, of_window in self._before(checkpoint.position):
            self.ring[:, slot, places, 0].copy_(checkpoint.window_k[:, of_window])
            self.ring[:, slot, places, 1].copy_(checkpoint.window_v[:, of_window])

    def save_window(self, slot: int, checkpoint: CheckpointTensors) -> None:
        """Fill `checkpoint.window_k/v` from the ring; its newest page must be at most 64 tokens past the position."""
        self._save_layers(slice(None), slot, checkpoint)

    def save_window_of(self, layer: int, slot: int, checkpoint: CheckpointTensors) -> None:
        """`save_window` for one layer."""
        self._save_layers(slice(layer, layer + 1), slot, checkpoint)

    def save_windows_of(self, layer: int, spans: Sequence[Span]) -> None:
        """Those of decode spans whose tokens have been stored."""
        for span in spans:
            for save in span.saves:
                self.save_window_of(layer, span.slot, save.into)

    def _save_layers(self, layers: slice, slot: int, checkpoint: CheckpointTensors) -> None:
        assert checkpoint.window_k is not None and checkpoint.window_v is not None
        for places, of_window in self._before(checkpoint.position):
            checkpoint.window_k[layers, of_window].copy_(self.ring[layers, slot, places, 0])
            checkpoint.window_v[layers, of_window].copy_(self.ring[layers, slot, places, 1])

    def places_of(self, first: int, last: int) -> list[int]:
        """Of the pages first .. last in the ring."""
        return [page % self.places for page in range(first, last + 1)]

    def _before(self, position: int) -> list[tuple[slice, slice]]:
        """The R pages before a position on the grid, fewer near the start of the sequence: where they lie in the ring,
        and where in a checkpoint's window. Slices, because a GPU gets a list of places by a copy that it waits for."""
        page, size = position // PAGE, self.window_pages
        count = min(page, size)
        start, done = (page - count) % self.places, size - count
        straight = min(count, self.places - start)
        parts = []
        for begin, length in ((start, straight), (0, count - straight)):
            if length:
                parts.append((slice(begin, begin + length), slice(done, done + length)))
            done += length
        return parts


def fill_windows(layer: int, span: Span, band_P2KND: Tensor, window_pages: int) -> None:
    """Of a prefill span's save points. The band: the `window_pages` pages before the span, or all if there are fewer,
    and its own."""
    band_first = max(0, span.start // PAGE - window_pages)
    for save in span.saves:
        end = save.position // PAGE
        start = max(0, end - window_pages)
        _fill_window(save.into, layer, band_P2KND[start - band_first : end - band_first])


def _fill_window(checkpoint: CheckpointTensors, layer: int, kv_P2KND: Tensor) -> None:
    """Write the last len(kv_P2KND) of a checkpoint's window pages; earlier ones lie before position 0."""
    assert checkpoint.window_k is not None and checkpoint.window_v is not None
    checkpoint.window_k[layer, -len(kv_P2KND) :] = kv_P2KND[:, 0]
    checkpoint.window_v[layer, -len(kv_P2KND) :] = kv_P2KND[:, 1]
