"""Where the plain path stores a batch's keys and values, and what its queries read at which precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.kv.batch import Span
from kakera.kv.plain.attend import DECODE_PIECE
from kakera.kv.plain.pages import DensePool, Int2Pool, PagePool
from kakera.kv.recent import fill_windows
from kakera.kv.store import DenseStore, Int2Store


@dataclass(frozen=True)
class DecodeTokens:
    """The tokens of a batch's decode spans: span and position of each; ids_T of their pages, offsets_T in them."""

    spans: Sequence[Span]
    tokens: Sequence[tuple[Span, int]]
    ids_T: Tensor
    offsets_T: Tensor

    @staticmethod
    def of(spans: Sequence[Span]) -> DecodeTokens:
        tokens = [(span, span.start + i) for span in spans for i in range(span.count)]
        ids_T = torch.stack([span.pages[position // PAGE] for span, position in tokens])
        offsets_T = torch.tensor([position % PAGE for _, position in tokens], device=ids_T.device)
        return DecodeTokens(spans, tokens, ids_T, offsets_T)


class StoredKeys(Protocol):
    """Keys and values, rounded and in the store's frame; `layer` counts the full-attention layers."""

    @property
    def pool(self) -> PagePool: ...

    def store_segment(self, layer: int, span: Span, kv_P2KND: Tensor) -> tuple[Tensor, Tensor | None]:
        """Write a prefill segment's pages everywhere and fill its save points. Returns the band (the R pages before the
        segment and the segment) and the sink in float32; None if the pool itself is exact."""
        ...

    def store_tokens(self, layer: int, decode: DecodeTokens, kv_T2KD: Tensor) -> None: ...

    def read_at(self, layer: int, span: Span, position: int) -> tuple[Tensor, Tensor]:
        """What a query there reads: the page ids of its history, and float32 rows of everything newer, valid until the
        next call."""
        ...

    def scratch(self) -> tuple[Tensor, ...]: ...


class DenseKeys:
    """Exact pages and nothing else."""

    def __init__(self, store: DenseStore):
        self.pool: PagePool = DensePool(store)

    def store_segment(self, layer: int, span: Span, kv_P2KND: Tensor) -> tuple[Tensor, Tensor | None]:
        _write_pages(self.pool, layer, span, kv_P2KND)
        return kv_P2KND, None

    def store_tokens(self, layer: int, decode: DecodeTokens, kv_T2KD: Tensor) -> None:
        self.pool.write_tokens(layer, decode.ids_T, decode.offsets_T, kv_T2KD)

    def read_at(self, layer: int, span: Span, position: int) -> tuple[Tensor, Tensor]:
        page, offset = divmod(position, PAGE)
        own_2KND = self.pool.read(layer, span.pages[page : page + 1])
        return span.pages[:page], own_2KND[:, :, : offset + 1]

    def scratch(self) -> tuple[Tensor, ...]:
        return self.pool.scratch()


class WindowedKeys:
    """2-bit pages, and 16-bit rows of the sink and the window beside them."""

    def __init__(self, store: Int2Store):
        self.pool: PagePool = Int2Pool(store, DECODE_PIECE)
        self._recent, self._window_pages = store.recent, store.window_pages
        heads, dim = store.centres_L2KD.shape[2:]
        rows = (self._window_pages + 2) * PAGE  # the window, the query's own page and the sink
        self._rows = torch.empty(2, heads, rows, dim, device=store.device)

    def store_segment(self, layer: int, span: Span, kv_P2KND: Tensor) -> tuple[Tensor, Tensor | None]:
        first = span.start // PAGE
        _write_pages(self.pool, layer, span, kv_P2KND)
        band_first = max(0, first - self._window_pages)
        # the old pages must be read first: a long segment overwrites what its own first pages still need
        before_P2KND = self._recent.read_pages(layer, span.slot, band_first, first - 1)
        band_P2KND = torch.cat((before_P2KND, kv_P2KND))
        self._recent.write_pages(layer, span.slot, first, kv_P2KND)
        fill_windows(layer, span, band_P2KND, self._window_pages)
        return band_P2KND, self._recent.sink[layer, span.slot].float()

    def store_tokens(self, layer: int, decode: DecodeTokens, kv_T2KD: Tensor) -> None:
        self.pool.write_tokens(layer, decode.ids_T, decode.offsets_T, kv_T2KD)
        for (span, position), kv_2KD in zip(decode.tokens, kv_T2KD, strict=True):
            self._recent.write_token(layer, span.slot, position, kv_2KD)
        self._recent.save_windows_of(layer, decode.spans)

    def read_at(self, layer: int, span: Span, position: int) -> tuple[Tensor, Tensor]:
        page = position // PAGE
        history = span.pages[1 : max(1, page - self._window_pages)]
        return history, self._recent_rows(layer, span.slot, position)

    def _recent_rows(self, layer: int, slot: int, position: int) -> Tensor:
        """All that a query at `position` reads in 16 bit, as float32 [2, kv_heads, N, D]."""
        page, offset = divmod(position, PAGE)
        first, places = max(0, page - self._window_pages), self._recent.places
        ring = self._recent.ring[layer, slot]
        start, count = first % places, page - first
        wrapped = max(0, start + count - places)
        own = page % places
        parts = [self._recent.sink[layer, slot].unsqueeze(0)] if first else []
        parts += [ring[start : start + count - wrapped], ring[:wrapped], ring[own : own + 1, :, :, : offset + 1]]
        filled = 0
        for part in parts:
            pages, tokens = part.shape[0], part.shape[3]
            if pages:
                rows = self._rows[:, :, filled : filled + pages * tokens]
                torch.unflatten(rows, 2, (pages, tokens)).copy_(part.permute(1, 2, 0, 3, 4))
            filled += pages * tokens
        return self._rows[:, :, :filled]

    def scratch(self) -> tuple[Tensor, ...]:
        return (*self.pool.scratch(), self._rows)


def _write_pages(pool: PagePool, layer: int, span: Span, kv_P2KND: Tensor) -> None:
    first = span.start // PAGE
    pool.write_pages(layer, span.pages[first : first + len(kv_P2KND)], kv_P2KND)
