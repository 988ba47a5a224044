"""PlainAttention: the operations of torch, on a CPU or a GPU, and the reference of every other backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.kv.backend import check_spans
from kakera.kv.batch import Batch, Span
from kakera.kv.plain.attend import attend_prefill, attend_token
from kakera.kv.plain.frame import ModelFrame, RotatedFrame
from kakera.kv.plain.keys import DecodeTokens, DenseKeys, WindowedKeys
from kakera.kv.plain.pages import DensePool
from kakera.kv.store import DenseStore, Int2Store
from kakera.ops.heads import ProjectedHeads


class PlainAttention:
    """Prefill spans give the same bits for any chunking on the 64 grid, alone or batched, cold or restored. Decode
    spans go token by token: a row's bits do not depend on its batch or on how many tokens it carries."""

    capturable = False  # it asks the host here and there

    def __init__(self, spec: ModelSpec, store: DenseStore | Int2Store):
        self.spec, self.dtype, self.window_pages = spec, store.dtype, store.window_pages
        self.frame = RotatedFrame(store) if isinstance(store, Int2Store) else ModelFrame()
        self.keys = WindowedKeys(store) if isinstance(store, Int2Store) else DenseKeys(DensePool(store))

    def prepare(self) -> None:
        """Nothing is slow at first."""

    def plan(self, batch: Batch) -> PlainPass:
        check_spans(batch)
        return PlainPass(self, batch, DecodeTokens.of(batch.decode) if batch.decode else None)

    def scratch(self) -> tuple[Tensor, ...]:
        return self.keys.scratch()


@dataclass(frozen=True)
class PlainPass:
    """`decode`: None without decode spans."""

    of: PlainAttention
    batch: Batch
    decode: DecodeTokens | None

    def run(self, layer: int, heads: ProjectedHeads) -> Tensor:
        return heads.gated(self.attend(layer, *heads.turned()))

    def attend(self, layer: int, q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, heads, D] in q's dtype, before the gate; q, k, v are after RoPE, in the model's own frame."""
        kv_T2KD = torch.stack((k_TKD, v_TKD), 1).float()
        self.of.frame.centre(layer, kv_T2KD)
        scaled_TQD = q_TQD.float() * self.of.spec.head_dim**-0.5
        o_TQD = torch.empty_like(scaled_TQD)
        if self.decode is not None:
            rows = slice(0, self.batch.decode_tokens)
            o_TQD[rows] = self._decode(layer, self.decode, scaled_TQD[rows], kv_T2KD[rows])
        for span in self.batch.prefill:
            o_TQD[span.rows] = self._prefill(layer, span, scaled_TQD[span.rows], kv_T2KD[span.rows])
        self.of.frame.uncentre(layer, o_TQD)
        return o_TQD.to(q_TQD.dtype)

    def _prefill(self, layer: int, span: Span, q_NQD: Tensor, kv_N2KD: Tensor) -> Tensor:
        """All matrix products have the shape of one page of one model, so that bits do not depend on the chunk."""
        spec, frame, keys = self.of.spec, self.of.frame, self.of.keys
        first, last = span.start // PAGE, (span.end - 1) // PAGE
        q_PKMD = _to_pages(torch.unflatten(q_NQD, 1, (spec.kv_heads, -1)), last - first + 1).flatten(2, 3)
        kv_P2KND = _to_pages(kv_N2KD, last - first + 1)
        frame.turn_pages(layer, q_PKMD, kv_P2KND)
        band_P2KND, sink_2KND = keys.store_segment(layer, span, kv_P2KND.to(self.of.dtype))
        window = self.of.window_pages
        o_PKMD = attend_prefill(keys.pool, layer, span.pages, first, q_PKMD, band_P2KND, window, sink_2KND)
        frame.turn_pages_back(layer, o_PKMD)
        o_PKGND = o_PKMD.view(-1, spec.kv_heads, spec.group, PAGE, spec.head_dim)
        return o_PKGND.permute(0, 3, 1, 2, 4).reshape(-1, spec.heads, spec.head_dim)[: span.count]

    def _decode(self, layer: int, decode: DecodeTokens, q_TQD: Tensor, kv_T2KD: Tensor) -> Tensor:
        """Every product has the shape of one token or of one vector, so that a row's bits do not depend on its batch;
        what has no sums is done for all rows at once."""
        frame, keys = self.of.frame, self.of.keys
        q_TKGD = torch.unflatten(q_TQD, 1, (self.of.spec.kv_heads, -1))
        q_TKGD, kv_T2KD = frame.turn_tokens(layer, q_TKGD, kv_T2KD)
        keys.store_tokens(layer, decode, kv_T2KD.to(self.of.dtype))
        outputs = []
        for (span, position), q_KGD in zip(decode.tokens, q_TKGD, strict=True):
            history, recent_2KND = keys.read_at(layer, span, position)
            outputs.append(attend_token(keys.pool, layer, history, q_KGD, recent_2KND))
        return frame.turn_tokens_back(layer, torch.stack(outputs)).flatten(1, 2)


def _to_pages(x_NAD: Tensor, pages: int) -> Tensor:
    """Tokens of a segment [N, ..., D] to whole pages [P, ..., 64, D], zeros behind the last token."""
    padded = x_NAD.new_zeros(pages * PAGE, *x_NAD.shape[1:])
    padded[: len(x_NAD)] = x_NAD
    return torch.unflatten(padded, 0, (pages, PAGE)).movedim(1, -2).contiguous()
