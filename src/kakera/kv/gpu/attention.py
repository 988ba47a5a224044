"""What a KVCache does on an NVIDIA GPU: one launch stores, two attend for decode rows, a library and a few for prefill.

The plain path of `kv.cache` is its reference, position by position; products have fp16 operands here (decode: 16-bit
keys as they are, queries split into two bf16).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
from kakera.model.batch import Batch, Span
from kakera.ops.heads import ProjectedHeads
from kakera.plan.kv_format import PAGE_TOKENS, KvFormat
from kakera.plan.prefill_plan import PrefillPlan
from kakera.plan.spec import ModelSpec

ROW_TOKENS = COLUMNS  # a longer decode span goes as several rows, which read the same pages
HALVES = (torch.float16, torch.bfloat16)


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
        pages = self._window_pages + -(-chunk // PAGE_TOKENS) if recent else 0
        shape = (pages, 2, spec.kv_heads, PAGE_TOKENS, spec.head_dim)
        self._band_P2KND = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self._plan: tuple[Batch, _Decode | None, list[Places]] | None = None

    @staticmethod
    def create(
        spec: ModelSpec,
        fmt: KvFormat,
        pool: PagePool,
        recent: RecentStore | None,
        rotation: Rotation | None,
        centres: Tensor,
        slots: int,
        chunk: int,
    ) -> GpuAttention | None:
        """None where there is no kernel for the model or the format: other head sizes, groups, rotation files."""
        if pool.tensors()[0].device.type != "cuda" or fmt.codec not in ("int2", "bf16"):
            return None
        groups = spec.head_dim // fmt.group if recent else 1
        turned = rotation is not None and (rotation.k.rotation_LKDD, rotation.v.rotation_LKDD) != (None, None)
        if turned or not can_decode(spec.head_dim, groups) or not can_write(spec.head_dim, spec.rotary_dim):
            return None
        return GpuAttention(spec, fmt, pool, recent, centres, slots, chunk)

    def takes(self, heads: ProjectedHeads) -> bool:
        return heads.q_TQD.dtype in HALVES

    def __call__(self, layer: int, batch: Batch, heads: ProjectedHeads) -> Tensor:
        """Store the batch's keys and values and return its gated attention, [T, I] in the projection's dtype. Fills the
        window of every save point. Raises ValueError for spans that no plan makes."""
        decode, prefill = self._plan_of(batch)
        q_TQD = torch.empty(heads.q_TQD.shape, dtype=torch.float16, device=heads.q_TQD.device)
        y_TQD = torch.empty(heads.q_TQD.shape, dtype=heads.q_TQD.dtype, device=heads.q_TQD.device)
        centres_2KD = self._centres_L2KD[layer]
        if decode is not None:
            rows = slice(0, batch.decode_rows)
            self._attend_decode(layer, decode, batch.decode, heads.part(rows), centres_2KD, q_TQD[rows], y_TQD[rows])
        for span, places in zip(batch.prefill, prefill, strict=True):
            part = heads.part(span.rows)
            self._attend_prefill(layer, span, places, part, centres_2KD, q_TQD[span.rows], y_TQD[span.rows])
        return y_TQD.flatten(1)

    def _attend_decode(
        self,
        layer: int,
        decode: _Decode,
        spans: Sequence[Span],
        heads: ProjectedHeads,
        centres_2KD: Tensor,
        q_TQD: Tensor,
        y_TQD: Tensor,
    ) -> None:
        pages = self._layer(layer)
        write_rows(heads, pages, decode.places, centres_2KD, q_TQD)
        for first, rows in decode.rows:
            part = slice(first, first + rows.tokens)
            attend_decode(
                pages, rows, q_TQD[part], self._finish(heads.part(part), centres_2KD, y_TQD[part]), self._decode_scratch
            )
        if self._recent is not None:
            for span in spans:
                for save in span.saves:
                    self._recent.save_window_of(layer, span.slot, save.into)

    def _attend_prefill(
        self,
        layer: int,
        span: Span,
        places: Places,
        heads: ProjectedHeads,
        centres_2KD: Tensor,
        q_TQD: Tensor,
        y_TQD: Tensor,
    ) -> None:
        pages = self._layer(layer)
        history: Int2History | Bf16History
        if self._recent is None:
            write_rows(heads, pages, places, None, q_TQD)
            history, band_P2KND = Bf16History(self._pools[0][layer]), None
        else:
            band_P2KND = self._store(layer, span, places, heads, centres_2KD, q_TQD)
            assert pages.codes is not None and pages.parameters is not None
            history = Int2History(pages.codes, pages.parameters, self._recent.sink[layer, span.slot])
        o_TQD = torch.empty_like(q_TQD)
        self._prefill_attention(history, span.pages, span.start, q_TQD, band_P2KND, o_TQD)
        self._finish(heads, centres_2KD, y_TQD)(o_TQD)

    def _store(
        self, layer: int, span: Span, places: Places, heads: ProjectedHeads, centres_2KD: Tensor, q_TQD: Tensor
    ) -> Tensor:
        """Codes to the pages, 16-bit rows to the band, and what of it lasts to ring, sink and save points. Returns the
        band: the R pages before the span, and its own."""
        recent = self._recent
        assert recent is not None
        first, last = span.start // PAGE_TOKENS, (span.end - 1) // PAGE_TOKENS
        start = max(0, first - self._window_pages)
        band_P2KND = self._band_P2KND[: last + 1 - start]
        # the old pages must be read first: a long segment overwrites what its own first pages still need
        band_P2KND[: first - start] = recent.read_pages(layer, span.slot, start, first - 1)
        codes, parameters = (pool[layer] for pool in self._pools)
        own_P2KND = band_P2KND[first - start :]
        write_rows(heads, LayerPages(codes, parameters, own_P2KND, None), places, centres_2KD, q_TQD)
        recent.write_pages(layer, span.slot, first, own_P2KND)
        for save in span.saves:
            end = save.position // PAGE_TOKENS
            from_page = max(0, end - self._window_pages)
            fill_window(save.into, layer, band_P2KND[from_page - start : end - start])
        return band_P2KND

    def _layer(self, layer: int) -> LayerPages:
        if self._recent is None:
            return LayerPages(None, None, self._pools[0][layer], None)
        codes, parameters = (pool[layer] for pool in self._pools)
        return LayerPages(codes, parameters, self._recent.ring[layer], self._recent.sink[layer])

    def _finish(self, heads: ProjectedHeads, centres_2KD: Tensor, y_TQD: Tensor) -> Finish:
        coded = self._recent is not None
        return Finish(y_TQD, coded, centres_2KD[1] if coded else None, heads.gate_TI)

    def _plan_of(self, batch: Batch) -> tuple[_Decode | None, list[Places]]:
        """Where tokens go and what rows read: the same for all layers, so made once for a batch."""
        if self._plan is None or self._plan[0] is not batch:
            decode = _Decode(batch.decode, self._window_pages, self._rows) if batch.decode else None
            self._plan = batch, decode, [self._prefill_places(span) for span in batch.prefill]
        return self._plan[1:]

    def _prefill_places(self, span: Span) -> Places:
        if span.start % PAGE_TOKENS:
            raise ValueError(f"a prefill segment starts at {span.start}, which is not a multiple of {PAGE_TOKENS}")
        position_T = torch.arange(span.start, span.end, device=span.pages.device)
        page_T = position_T // PAGE_TOKENS
        id_T = span.pages[page_T]
        half_T = id_T if self._recent is None else page_T - span.start // PAGE_TOKENS
        return _places(id_T, half_T, torch.full_like(id_T, -1), position_T % PAGE_TOKENS)

    def scratch(self) -> tuple[Tensor, ...]:
        decode = self._decode_scratch
        return decode.partial, decode.stats, self._band_P2KND, *self._prefill_attention.scratch()


class _Decode:
    """The decode spans of a batch: places of their tokens, and rows in launches of at most `most` rows, each launch
    with the token it begins at."""

    def __init__(self, spans: Sequence[Span], window_pages: int, most: int):
        if (longest := max(span.count for span in spans)) > PAGE_TOKENS:
            raise ValueError(f"a decode row carries {longest} tokens; at most {PAGE_TOKENS} are allowed")
        device = spans[0].pages.device
        positions = [(span, position) for span in spans for position in range(span.start, span.end)]
        id_T = torch.stack([span.pages[position // PAGE_TOKENS] for span, position in positions])
        ring = window_pages + 2
        halves = [span.slot * ring + position // PAGE_TOKENS % ring for span, position in positions]
        sinks = [span.slot if position < PAGE_TOKENS else -1 for span, position in positions]
        offsets = [position % PAGE_TOKENS for _, position in positions]
        half_T, sink_T, offset_T = torch.tensor([halves, sinks, offsets], device=device)
        self.places = _places(id_T, half_T if window_pages else id_T, sink_T, offset_T)
        rows = [
            (span, start, min(ROW_TOKENS, span.end - start))
            for span in spans
            for start in range(span.start, span.end, ROW_TOKENS)
        ]
        self.rows: list[tuple[int, DecodeRows]] = []
        token = 0
        for begin in range(0, len(rows), most):
            part = rows[begin : begin + most]
            self.rows.append((token, _rows(part, device)))
            token += sum(count for _, _, count in part)


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
