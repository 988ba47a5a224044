"""The 16-bit sink page and window ring of each running request (int2 codec only).

Page p of a sequence lies at place p % (R + 2) of its slot's ring: R pages before the query's own, its own, and one
more that a row of several tokens may have entered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.kv.codec import WINDOW_DTYPE
from kakera.model.batch import CheckpointTensors
from kakera.plan.kv_format import KvFormat
from kakera.plan.spec import ModelSpec


class RecentStore:
    """ring: bf16 [L, S, R + 2, 2 (K, V), kv_heads, 64, D]; sink: bf16 [L, S, 2, kv_heads, 64, D]; rotated frame."""

    def __init__(self, spec: ModelSpec, fmt: KvFormat, slots: int, device: torch.device):
        self._window_pages = fmt.window_pages
        self._places = fmt.ring_pages
        layers, page = len(spec.full_layers), (2, spec.kv_heads, PAGE, spec.head_dim)
        self.ring = torch.empty((layers, slots, self._places, *page), dtype=WINDOW_DTYPE, device=device)
        self.sink = torch.empty((layers, slots, *page), dtype=WINDOW_DTYPE, device=device)
        rows = (self._window_pages + 2) * PAGE  # the window, the query's own page and the sink
        self._rows = torch.empty(2, spec.kv_heads, rows, spec.head_dim, device=device)

    def write_pages(self, layer: int, slot: int, first: int, kv_P2KND: Tensor) -> None:
        """Keep the newest pages of a prefill segment whose first page is `first`, and page 0 as the sink."""
        kept_P2KND = kv_P2KND[-self._places :]
        last = first + kv_P2KND.shape[0] - 1
        self.ring[layer, slot, self._at(last - kept_P2KND.shape[0] + 1, last)] = kept_P2KND
        if first == 0:
            self.sink[layer, slot] = kv_P2KND[0]

    def write_token(self, layer: int, slot: int, position: int, kv_2KD: Tensor) -> None:
        page, offset = divmod(position, PAGE)
        self.ring[layer, slot, page % self._places, :, :, offset] = kv_2KD
        if page == 0:
            self.sink[layer, slot, :, :, offset] = kv_2KD

    def read_pages(self, layer: int, slot: int, first: int, last: int) -> Tensor:
        """A copy of the pages first .. last, [P, 2, kv_heads, 64, D] bf16; they must still be in the ring."""
        return self.ring[layer, slot, self._at(first, last)]

    def sink_rows(self, layer: int, slot: int) -> Tensor:
        """float32 [2, kv_heads, 64, D]."""
        return self.sink[layer, slot].float()

    def token_rows(self, layer: int, slot: int, position: int) -> Tensor:
        """All that a query at `position` reads in 16 bit, as float32 [2, kv_heads, N, D]; valid until the next call."""
        page, offset = divmod(position, PAGE)
        first = max(0, page - self._window_pages)
        ring = self.ring[layer, slot]
        start, count = first % self._places, page - first
        wrapped = max(0, start + count - self._places)
        own = page % self._places
        parts = [self.sink[layer, slot].unsqueeze(0)] if first else []
        parts += [ring[start : start + count - wrapped], ring[:wrapped], ring[own : own + 1, :, :, : offset + 1]]
        filled = 0
        for part in parts:
            pages, tokens = part.shape[0], part.shape[3]
            if pages:
                rows = self._rows[:, :, filled : filled + pages * tokens]
                torch.unflatten(rows, 2, (pages, tokens)).copy_(part.permute(1, 2, 0, 3, 4))
            filled += pages * tokens
        return self._rows[:, :, :filled]

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

    def _save_layers(self, layers: slice, slot: int, checkpoint: CheckpointTensors) -> None:
        assert checkpoint.window_k is not None and checkpoint.window_v is not None
        for places, of_window in self._before(checkpoint.position):
            checkpoint.window_k[layers, of_window].copy_(self.ring[layers, slot, places, 0])
            checkpoint.window_v[layers, of_window].copy_(self.ring[layers, slot, places, 1])

    def _at(self, first: int, last: int) -> list[int]:
        return [page % self._places for page in range(first, last + 1)]

    def _before(self, position: int) -> list[tuple[slice, slice]]:
        """The R pages before a position on the grid, fewer near the start of the sequence: where they lie in the ring,
        and where in a checkpoint's window. Slices, because a GPU gets a list of places by a copy that it waits for."""
        page, size = position // PAGE, self._window_pages
        count = min(page, size)
        start, done = (page - count) % self._places, size - count
        straight = min(count, self._places - start)
        parts = []
        for begin, length in ((start, straight), (0, count - straight)):
            if length:
                parts.append((slice(begin, begin + length), slice(done, done + length)))
            done += length
        return parts

    def scratch(self) -> tuple[Tensor, ...]:
        return (self._rows,)


def fill_window(checkpoint: CheckpointTensors, layer: int, kv_P2KND: Tensor) -> None:
    """Write the last len(kv_P2KND) of a checkpoint's window pages; earlier ones lie before position 0."""
    assert checkpoint.window_k is not None and checkpoint.window_v is not None
    checkpoint.window_k[layer, -len(kv_P2KND) :] = kv_P2KND[:, 0]
    checkpoint.window_v[layer, -len(kv_P2KND) :] = kv_P2KND[:, 1]
