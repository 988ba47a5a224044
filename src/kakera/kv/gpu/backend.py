"""GpuAttention: one launch stores, two attend for decode rows, a library and a few for prefill.

`kv.plain` is its reference, position by position; products have fp16 operands here (decode: 16-bit keys as they are,
queries split into two bf16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.kv.backend import check_spans
from kakera.kv.batch import Batch, Span
from kakera.kv.gpu.decode import MOST_ROWS, DecodeScratch, LayerPages, attend_decode, query_tiles
from kakera.kv.gpu.finish import Finish
from kakera.kv.gpu.layout import ROW_TOKENS, DecodeLayout
from kakera.kv.gpu.prefill import Bf16History, Int2History, PrefillAttention
from kakera.kv.gpu.write import Places, write_rows
from kakera.kv.recent import fill_windows
from kakera.kv.store import DenseStore, Int2Store
from kakera.ops.heads import ProjectedHeads
from kakera.plan.prefill_plan import PrefillPlan
from kakera.target.as_torch import HALVES


@dataclass(frozen=True)
class _Part:
    """Some tokens of a batch in one layer: what they bring, and where their queries and results go.

    pages: of the layer; centres_2KD: None for a bf16 cache; q_TQD, y_TQD: fp16 scratch and the result, contiguous.
    """

    layer: int
    pages: LayerPages
    centres_2KD: Tensor | None
    heads: ProjectedHeads
    q_TQD: Tensor
    y_TQD: Tensor

    def tokens(self, rows: slice) -> _Part:
        return replace(self, heads=self.heads.part(rows), q_TQD=self.q_TQD[rows], y_TQD=self.y_TQD[rows])

    def store(self, pages: LayerPages, places: Places) -> None:
        write_rows(self.heads, pages, places, self.centres_2KD, self.q_TQD)

    def finish(self) -> Finish:
        centre_KD = None if self.centres_2KD is None else self.centres_2KD[1]
        return Finish(self.y_TQD, centre_KD is not None, centre_KD, self.heads.gate_TI)


class _Bf16Pages:
    """A store as the kernels take it: exact pages, in the model's own frame."""

    def __init__(self, store: DenseStore):
        self._store = store

    def of_layer(self, layer: int) -> tuple[LayerPages, Tensor | None]:
        """And the centres, if the frame is rotated."""
        return LayerPages(None, None, self._store.kv_LP2KND[layer], None), None

    def halves_of(self, span: Span, page_T: Tensor, id_T: Tensor) -> Tensor:
        """`Places.half_T` of a prefill span's tokens."""
        return id_T

    def store_segment(self, span: Span, places: Places, part: _Part) -> tuple[Bf16History, None]:
        """What a prefill span brings goes everywhere, save points included. Returns its history and its band: the R
        pages before the span, and its own; None where pages are exact."""
        part.store(part.pages, places)
        return Bf16History(part.pages.halves), None

    def save_windows(self, layer: int, spans: Sequence[Span]) -> None:
        """Of decode spans' save points."""

    def scratch(self) -> tuple[Tensor, ...]:
        return ()


class _Int2Pages:
    """The same of 2-bit pages and 16-bit rings, in the Hadamard frame."""

    def __init__(self, store: Int2Store, chunk: int):
        self._store = store
        pages = store.window_pages + -(-chunk // PAGE)
        page = store.recent.sink.shape[2:]
        self._band_P2KND = torch.empty((pages, *page), dtype=torch.bfloat16, device=store.device)

    def of_layer(self, layer: int) -> tuple[LayerPages, Tensor | None]:
        store = self._store
        ring, sink = store.recent.ring[layer], store.recent.sink[layer]
        return LayerPages(store.codes[layer], store.parameters[layer], ring, sink), store.centres_L2KD[layer]

    def halves_of(self, span: Span, page_T: Tensor, id_T: Tensor) -> Tensor:
        return page_T - span.start // PAGE

    def store_segment(self, span: Span, places: Places, part: _Part) -> tuple[Int2History, Tensor]:
        """Codes to the pages, 16-bit rows to the band, and what of it lasts to ring, sink and save points."""
        recent, window_pages = self._store.recent, self._store.window_pages
        first, last = span.start // PAGE, (span.end - 1) // PAGE
        start = max(0, first - window_pages)
        band_P2KND = self._band_P2KND[: last + 1 - start]
        # the old pages must be read first: a long segment overwrites what its own first pages still need
        band_P2KND[: first - start] = recent.read_pages(part.layer, span.slot, start, first - 1)
        own_P2KND = band_P2KND[first - start :]
        part.store(replace(part.pages, halves=own_P2KND, sink=None), places)
        recent.write_pages(part.layer, span.slot, first, own_P2KND)
        fill_windows(part.layer, span, band_P2KND, window_pages)
        codes, parameters = self._store.codes[part.layer], self._store.parameters[part.layer]
        return Int2History(codes, parameters, recent.sink[part.layer, span.slot]), band_P2KND

    def save_windows(self, layer: int, spans: Sequence[Span]) -> None:
        self._store.recent.save_windows_of(layer, spans)

    def scratch(self) -> tuple[Tensor, ...]:
        return (self._band_P2KND,)


class GpuAttention:
    """Kernels over a store, and their scratch, of a size fixed at construction."""

    capturable = True

    def __init__(self, spec: ModelSpec, store: DenseStore | Int2Store, slots: int, chunk: int):
        """`chunk`: tokens of the longest prefill span."""
        device, self.window_pages = store.device, store.window_pages
        self.pages = _Int2Pages(store, chunk) if isinstance(store, Int2Store) else _Bf16Pages(store)
        tiles = query_tiles(ROW_TOKENS, spec.group)
        self._rows = min(slots, MOST_ROWS)
        self.decode_scratch = DecodeScratch.allocate(self._rows, tiles, spec.kv_heads, spec.head_dim, device)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        plan = PrefillPlan(spec.heads, spec.kv_heads, spec.head_dim, self.window_pages, chunk, multiprocessors)
        self.prefill_attention = PrefillAttention(plan, device)

    def prepare(self) -> None:
        """What the first calls would wait for, where shapes need a plan of the library."""
        self.prefill_attention.prepare()

    def plan(self, batch: Batch) -> GpuPass:
        check_spans(batch)
        for span in batch.prefill:
            if span.count > (most := self.prefill_attention.plan.chunk):
                raise ValueError(f"a prefill segment of {span.count} tokens; the scratch of this cache is for {most}")
        return GpuPass(self, batch, self._decode_of(batch), [self._prefill_places(span) for span in batch.prefill])

    def _decode_of(self, batch: Batch) -> DecodeLayout | None:
        if batch.singles is not None and len(batch.decode) <= self._rows:
            return DecodeLayout.of_singles(batch.singles, self.window_pages)
        return DecodeLayout.of_spans(batch.decode, self.window_pages, self._rows) if batch.decode else None

    def _prefill_places(self, span: Span) -> Places:
        position_T = torch.arange(span.start, span.end, device=span.pages.device)
        page_T = position_T // PAGE
        id_T = span.pages[page_T]
        half_T = self.pages.halves_of(span, page_T, id_T)
        return Places.of(id_T, half_T, torch.full_like(id_T, -1), position_T % PAGE)

    def scratch(self) -> tuple[Tensor, ...]:
        decode = self.decode_scratch
        return decode.partial, decode.stats, *self.pages.scratch(), *self.prefill_attention.scratch()


@dataclass(frozen=True)
class GpuPass:
    """A batch laid out: its decode rows, if any, and the places of each prefill span's tokens."""

    of: GpuAttention
    batch: Batch
    decode: DecodeLayout | None
    prefill: Sequence[Places]

    def run(self, layer: int, heads: ProjectedHeads) -> Tensor:
        """As `AttentionPass`. Raises ValueError for activations that kernels do not take."""
        if heads.q_TQD.dtype not in HALVES:  # a kernel would read other bytes as 16-bit ones
            raise ValueError(f"attention kernels take 16-bit activations, not {heads.q_TQD.dtype}")
        pages, centres_2KD = self.of.pages.of_layer(layer)
        q_TQD = torch.empty(heads.q_TQD.shape, dtype=torch.float16, device=heads.q_TQD.device)
        y_TQD = torch.empty(heads.q_TQD.shape, dtype=heads.q_TQD.dtype, device=heads.q_TQD.device)
        part = _Part(layer, pages, centres_2KD, heads, q_TQD, y_TQD)
        if self.decode is not None:
            self._attend_decode(self.decode, part.tokens(slice(0, self.batch.decode_tokens)))
        for span, places in zip(self.batch.prefill, self.prefill, strict=True):
            self._attend_prefill(span, places, part.tokens(span.rows))
        return y_TQD.flatten(1)

    def _attend_decode(self, decode: DecodeLayout, part: _Part) -> None:
        part.store(part.pages, decode.places)
        for first, rows in decode.rows:
            some = part.tokens(slice(first, first + rows.tokens))
            attend_decode(part.pages, rows, some.q_TQD, some.finish(), self.of.decode_scratch)
        self.of.pages.save_windows(part.layer, self.batch.decode)

    def _attend_prefill(self, span: Span, places: Places, part: _Part) -> None:
        history, band_P2KND = self.of.pages.store_segment(span, places, part)
        o_TQD = torch.empty_like(part.q_TQD)
        self.of.prefill_attention(history, span.pages, span.start, part.q_TQD, band_P2KND, o_TQD)
        part.finish()(o_TQD)
