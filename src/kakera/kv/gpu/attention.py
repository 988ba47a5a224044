"""What a KVCache does on an NVIDIA GPU: one launch stores, two attend for decode rows, a library and a few for prefill.

The plain path of `kv.cache` is its reference, position by position; products have fp16 operands here (decode: 16-bit
keys as they are, queries split into two bf16).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.kv.gpu.decode import (
    COLUMNS,
    MOST_ROWS,
    DecodeRows,
    DecodeScratch,
    LayerPages,
    attend_decode,
    can_decode,
    query_tiles,
)
from kakera.kv.gpu.finish import Finish
from kakera.kv.gpu.prefill import Bf16History, Int2History, PrefillAttention
from kakera.kv.gpu.write import Places, can_write, write_rows
from kakera.kv.pages import PagePool
from kakera.kv.recent import RecentStore, fill_window
from kakera.kv.rotation import Rotation
from kakera.model.batch import Batch, SingleTokens, Span
from kakera.ops.heads import ProjectedHeads
from kakera.plan.kv_format import KvFormat
from kakera.plan.prefill_plan import PrefillPlan
from kakera.plan.spec import ModelSpec

ROW_TOKENS = COLUMNS  # a longer decode span goes as several rows, which read the same pages
HALVES = (torch.float16, torch.bfloat16)


def can_attend(spec: ModelSpec, fmt: KvFormat, rotation: Rotation | None) -> bool:
    """Whether there are kernels for the model and the format: not for other head sizes, small groups, rotation files,
    graded codes, fp32 pages."""
    groups = spec.head_dim // fmt.group if fmt.windowed else 1
    turned = rotation is not None and (
        rotation.graded or rotation.k.rotation_LKDD is not None or rotation.v.rotation_LKDD is not None
    )
    known = can_decode(spec.head_dim, groups) and can_write(spec.head_dim, spec.rotary_dim)
    return known and fmt.codec in ("int2", "bf16") and not turned


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


class GpuAttention:
    """Kernels over the pools and rings of a KVCache, and their scratch, of a size fixed at construction."""

    def __init__(
        self,
        spec: ModelSpec,
        fmt: KvFormat,
        pool: PagePool,
        recent: RecentStore | None,
        centres: Tensor,
        slots: int,
        chunk: int,
    ):
        """`centres`: float32 [full layers, 2 (K, V), kv_heads, D]. `chunk`: tokens of the longest prefill span."""
        self._spec, self._recent, self._centres_L2KD = spec, recent, centres
        self._pools = pool.tensors()
        device = self._pools[0].device
        self._window_pages = fmt.window_pages if recent else 0
        tiles = query_tiles(ROW_TOKENS, spec.group)
        self._rows = min(slots, MOST_ROWS)
        self._decode_scratch = DecodeScratch.allocate(self._rows, tiles, spec.kv_heads, spec.head_dim, device)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        plan = PrefillPlan(spec.heads, spec.kv_heads, spec.head_dim, self._window_pages, chunk, multiprocessors)
        self._prefill_attention = PrefillAttention(plan, device)
        pages = self._window_pages + -(-chunk // PAGE) if recent else 0
        shape = (pages, 2, spec.kv_heads, PAGE, spec.head_dim)
        self._band_P2KND = torch.empty(shape, dtype=torch.bfloat16, device=device)
        # weakly, because a batch holds the checkpoints that were saved in it
        self._plan: tuple[weakref.ref[Batch], _Decode | None, list[Places]] | None = None

    def prepare(self) -> None:
        """What the first calls would wait for, where shapes need a plan of the library."""
        self._prefill_attention.prepare()

    def takes(self, heads: ProjectedHeads) -> bool:
        return heads.q_TQD.dtype in HALVES

    def __call__(self, layer: int, batch: Batch, heads: ProjectedHeads) -> Tensor:
        """Store the batch's keys and values and return its gated attention, [T, I] in the projection's dtype. Fills the
        window of every save point. Raises ValueError for spans that no plan makes, before anything is stored."""
        decode, prefill = self._plan_of(batch)
        q_TQD = torch.empty(heads.q_TQD.shape, dtype=torch.float16, device=heads.q_TQD.device)
        y_TQD = torch.empty(heads.q_TQD.shape, dtype=heads.q_TQD.dtype, device=heads.q_TQD.device)
        centres_2KD = self._centres_L2KD[layer] if self._recent is not None else None
        part = _Part(layer, self._layer(layer), centres_2KD, heads, q_TQD, y_TQD)
        if decode is not None:
            self._attend_decode(decode, batch.decode, part.tokens(slice(0, batch.decode_rows)))
        for span, places in zip(batch.prefill, prefill, strict=True):
            self._attend_prefill(span, places, part.tokens(span.rows))
        return y_TQD.flatten(1)

    def _attend_decode(self, decode: _Decode, spans: Sequence[Span], part: _Part) -> None:
        part.store(part.pages, decode.places)
        for first, rows in decode.rows:
            some = part.tokens(slice(first, first + rows.tokens))
            attend_decode(part.pages, rows, some.q_TQD, some.finish(), self._decode_scratch)
        if self._recent is not None:
            for span in spans:
                for save in span.saves:
                    self._recent.save_window_of(part.layer, span.slot, save.into)

    def _attend_prefill(self, span: Span, places: Places, part: _Part) -> None:
        history: Int2History | Bf16History
        if self._recent is None:
            part.store(part.pages, places)
            history, band_P2KND = Bf16History(part.pages.halves), None
        else:
            band_P2KND = self._store_segment(span, places, part)
            codes, parameters = (pool[part.layer] for pool in self._pools)
            history = Int2History(codes, parameters, self._recent.sink[part.layer, span.slot])
        o_TQD = torch.empty_like(part.q_TQD)
        self._prefill_attention(history, span.pages, span.start, part.q_TQD, band_P2KND, o_TQD)
        part.finish()(o_TQD)

    def _store_segment(self, span: Span, places: Places, part: _Part) -> Tensor:
        """Codes to the pages, 16-bit rows to the band, and what of it lasts to ring, sink and save points. Returns the
        band: the R pages before the span, and its own."""
        recent = self._recent
        assert recent is not None
        first, last = span.start // PAGE, (span.end - 1) // PAGE
        start = max(0, first - self._window_pages)
        band_P2KND = self._band_P2KND[: last + 1 - start]
        # the old pages must be read first: a long segment overwrites what its own first pages still need
        band_P2KND[: first - start] = recent.read_pages(part.layer, span.slot, start, first - 1)
        own_P2KND = band_P2KND[first - start :]
        part.store(replace(part.pages, halves=own_P2KND, sink=None), places)
        recent.write_pages(part.layer, span.slot, first, own_P2KND)
        for save in span.saves:
            end = save.position // PAGE
            from_page = max(0, end - self._window_pages)
            fill_window(save.into, part.layer, band_P2KND[from_page - start : end - start])
        return band_P2KND

    def _layer(self, layer: int) -> LayerPages:
        if self._recent is None:
            return LayerPages(None, None, self._pools[0][layer], None)
        codes, parameters = (pool[layer] for pool in self._pools)
        return LayerPages(codes, parameters, self._recent.ring[layer], self._recent.sink[layer])

    def _plan_of(self, batch: Batch) -> tuple[_Decode | None, list[Places]]:
        """Where tokens go and what rows read: the same for all layers, so made once for a batch."""
        if self._plan is None or self._plan[0]() is not batch:
            self._plan = (
                weakref.ref(batch),
                self._decode_of(batch),
                [self._prefill_places(span) for span in batch.prefill],
            )
        return self._plan[1:]

    def _decode_of(self, batch: Batch) -> _Decode | None:
        if batch.singles is not None and len(batch.decode) <= self._rows:
            return _Decode.of_singles(batch.singles, self._window_pages)
        return _Decode.of_spans(batch.decode, self._window_pages, self._rows) if batch.decode else None

    def _prefill_places(self, span: Span) -> Places:
        if span.start % PAGE:
            raise ValueError(f"a prefill segment starts at {span.start}, which is not a multiple of {PAGE}")
        if span.count > (most := self._prefill_attention.plan.chunk):
            raise ValueError(f"a prefill segment of {span.count} tokens; the scratch of this cache is for {most}")
        position_T = torch.arange(span.start, span.end, device=span.pages.device)
        page_T = position_T // PAGE
        id_T = span.pages[page_T]
        half_T = id_T if self._recent is None else page_T - span.start // PAGE
        return _places(id_T, half_T, torch.full_like(id_T, -1), position_T % PAGE)

    def scratch(self) -> tuple[Tensor, ...]:
        decode = self._decode_scratch
        return decode.partial, decode.stats, self._band_P2KND, *self._prefill_attention.scratch()


@dataclass(frozen=True)
class _Decode:
    """The decode spans of a batch: places of their tokens, and rows in launches, each with the token it begins at."""

    places: Places
    rows: Sequence[tuple[int, DecodeRows]]

    @staticmethod
    def of_singles(singles: SingleTokens, window_pages: int) -> _Decode:
        """In operations of the device alone, so that a graph can capture them."""
        page_R, slot_R = singles.starts_R // PAGE, singles.slots_R
        id_R = singles.tables_RP.gather(1, page_R[:, None])[:, 0]
        ring = window_pages + 2
        half_R = slot_R * ring + page_R % ring if window_pages else id_R
        places = _places(id_R, half_R, torch.where(page_R == 0, slot_R, -1), singles.starts_R % PAGE)
        count = len(slot_R)
        offsets = torch.arange(count + 1, dtype=torch.int32, device=slot_R.device)
        rows = DecodeRows(singles.starts_R.int(), offsets, slot_R.int(), singles.tables_RP, 1, count)
        return _Decode(places, [(0, rows)])

    @staticmethod
    def of_spans(spans: Sequence[Span], window_pages: int, most: int) -> _Decode:
        """At most `most` rows in a launch."""
        if (longest := max(span.count for span in spans)) > PAGE:
            raise ValueError(f"a decode row carries {longest} tokens; at most {PAGE} are allowed")
        device = spans[0].pages.device
        positions = [(span, position) for span in spans for position in range(span.start, span.end)]
        id_T = torch.stack([span.pages[position // PAGE] for span, position in positions])
        ring = window_pages + 2
        halves = [span.slot * ring + position // PAGE % ring for span, position in positions]
        sinks = [span.slot if position < PAGE else -1 for span, position in positions]
        offsets = [position % PAGE for _, position in positions]
        half_T, sink_T, offset_T = torch.tensor([halves, sinks, offsets], device=device)
        places = _places(id_T, half_T if window_pages else id_T, sink_T, offset_T)
        rows = [
            (span, start, min(ROW_TOKENS, span.end - start))
            for span in spans
            for start in range(span.start, span.end, ROW_TOKENS)
        ]
        launches: list[tuple[int, DecodeRows]] = []
        token = 0
        for begin in range(0, len(rows), most):
            part = rows[begin : begin + most]
            launches.append((token, _rows(part, device)))
            token += sum(count for _, _, count in part)
        return _Decode(places, launches)


def _rows(rows: Sequence[tuple[Span, int, int]], device: torch.device) -> DecodeRows:
    counts = [count for _, _, count in rows]
    offsets = torch.tensor([0, *counts]).cumsum(0)
    tables_RP = torch.nn.utils.rnn.pad_sequence([span.pages for span, _, _ in rows], batch_first=True)
    starts_R, slots_R = torch.tensor([[start for _, start, _ in rows], [span.slot for span, _, _ in rows]]).int()
    return DecodeRows(
        starts_R.to(device), offsets.int().to(device), slots_R.to(device), tables_RP.int(), max(counts), sum(counts)
    )


def _places(*parts: Tensor) -> Places:
    return Places(*(part.int() for part in parts))
