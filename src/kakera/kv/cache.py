"""KVCache: the paged keys and values of all full-attention layers of one model, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.errors import UsageError
from kakera.kv.attention import DECODE_PIECE, attend_prefill, attend_token
from kakera.kv.pages import create_pool
from kakera.kv.recent import RecentStore, fill_window
from kakera.kv.rotation import Rotation
from kakera.model.batch import Batch, CheckpointTensors, Span
from kakera.ops.heads import ProjectedHeads
from kakera.plan.kv_format import KvFormat
from kakera.plan.spec import ModelSpec

LONGEST_SPAN = 8192  # tokens of a prefill span, where nobody says otherwise


@dataclass(frozen=True)
class KvBytes:
    """What a KVCache holds, in bytes. `pages`, `ring` + `sink` are what KvFormat predicts; scratch has a fixed size."""

    pages: int
    ring: int
    sink: int
    rotation: int
    scratch: int


class _Token(NamedTuple):
    """One token of a decode span, and its position in the sequence."""

    span: Span
    position: int


class KVCache:
    """Pages, 16-bit sinks and windows, and the rotated frame they live in.

    `layer` in every method counts the full-attention layers. A query at position q reads the key at position p in
    16 bit if p < 64 or p // 64 >= q // 64 - R, and from INT2 otherwise. Prefill spans give the same bits for any
    chunking on the 64 grid, alone or batched, cold or restored. Decode spans go token by token: a row's bits do not
    depend on its batch or on how many tokens it carries.
    """

    def __init__(
        self,
        spec: ModelSpec,
        fmt: KvFormat,
        pages: int,
        slots: int,
        rotation: Rotation | None = None,
        device: torch.device | str = "cpu",
        chunk: int = LONGEST_SPAN,
    ):
        """`rotation` None: Hadamard for int2. `chunk`: tokens of the longest prefill span, which a GPU's scratch is
        for. Raises UsageError for a format and CheckpointError for a rotation that this model can not use."""
        fmt.check(spec.head_dim)
        if rotation is not None and not fmt.windowed:
            raise UsageError(f"--rotation: the {fmt.codec} cache is exact and takes no rotation; use --kv int2")
        self._spec = spec
        self._device = torch.device(device)
        graded = rotation is not None and rotation.graded
        if graded and fmt.group * 2 != spec.head_dim:
            raise UsageError(f"--rotation: a graded rotation needs --kv-group {spec.head_dim // 2}, not {fmt.group}")
        self._pool = create_pool(spec, fmt, pages, DECODE_PIECE, self._device, graded)
        self._window_pages = fmt.window_pages if fmt.windowed else 0
        self._recent = RecentStore(spec, fmt, slots, self._device) if fmt.windowed else None
        self._rotation: Rotation | None = None
        self._centres_L2KD = torch.zeros(len(spec.full_layers), 2, spec.kv_heads, spec.head_dim, device=self._device)
        if fmt.windowed:
            self._rotation = (rotation or Rotation.hadamard(spec)).to(self._device)
            self._rotation.check(spec)
            self._centres_L2KD = torch.stack((self._rotation.k.centre_LKD, self._rotation.v.centre_LKD), 1)
        self._kernels = None
        if self._device.type == "cuda":
            # Triton is there with CUDA builds of torch only
            from kakera.kv.gpu.attention import GpuAttention, can_attend

            if can_attend(spec, fmt, self._rotation):
                self._kernels = GpuAttention(spec, fmt, self._pool, self._recent, self._centres_L2KD, slots, chunk)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels take 16-bit projections, which a CUDA graph can capture."""
        return self._kernels is not None

    def prepare(self) -> None:
        """Do what the first calls would wait for (a GPU's library plans its kernels)."""
        if self._kernels is not None:
            self._kernels.prepare()

    def attend_heads(self, layer: int, batch: Batch, heads: ProjectedHeads) -> Tensor:
        """QK-norm and RoPE, then `attend`, then the output gate: [T, heads * D] in the projection's dtype."""
        if self._kernels is not None and self._kernels.takes(heads):
            return self._kernels(layer, batch, heads)
        return heads.gated(self.attend(layer, batch, *heads.turned()))

    def attend(self, layer: int, batch: Batch, q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Store the batch's keys and values and return its attention, [T, heads, D] in q's dtype, before the gate.

        q, k, v are after RoPE, in the model's own frame. Prefill spans start on a page border, decode spans have at
        most 64 tokens; ValueError otherwise. Fills the window of every save point.
        """
        kv_T2KD = torch.stack((k_TKD, v_TKD), 1).float()
        if self._rotation is not None:
            kv_T2KD -= self._centres_L2KD[layer]
        scaled_TQD = q_TQD.float() * self._spec.head_dim**-0.5
        o_TQD = torch.empty_like(scaled_TQD)
        if batch.decode:
            rows = slice(0, batch.decode_rows)
            o_TQD[rows] = self._decode(layer, batch.decode, scaled_TQD[rows], kv_T2KD[rows])
        for span in batch.prefill:
            o_TQD[span.rows] = self._prefill(layer, span, scaled_TQD[span.rows], kv_T2KD[span.rows])
        if self._rotation is not None:
            o_TQD += self._centres_L2KD[layer, 1].repeat_interleave(self._spec.group, 0)
        return o_TQD.to(q_TQD.dtype)

    def _prefill(self, layer: int, span: Span, q_NQD: Tensor, kv_N2KD: Tensor) -> Tensor:
        """All matrix products have the shape of one page of one model, so that bits do not depend on the chunk."""
        if span.start % PAGE:
            raise ValueError(f"a prefill segment starts at {span.start}, which is not a multiple of {PAGE}")
        first, last = span.start // PAGE, (span.end - 1) // PAGE
        heads, dim = self._spec.kv_heads, self._spec.head_dim
        q_PKMD = _to_pages(torch.unflatten(q_NQD, 1, (heads, -1)), last - first + 1).flatten(2, 3)
        kv_P2KND = _to_pages(kv_N2KD, last - first + 1)
        if self._rotation is not None:
            for q_KMD, (k_KND, v_KND) in zip(q_PKMD, kv_P2KND, strict=True):
                q_KMD.copy_(self._rotation.k.turn(layer, q_KMD))
                k_KND.copy_(self._rotation.k.turn(layer, k_KND))
                v_KND.copy_(self._rotation.v.turn(layer, v_KND))
        band_P2KND, sink_2KND = self._store_segment(layer, span, first, kv_P2KND.to(self._pool.dtype))
        o_PKMD = attend_prefill(self._pool, layer, span.pages, first, q_PKMD, band_P2KND, self._window_pages, sink_2KND)
        if self._rotation is not None:
            for o_KMD in o_PKMD:
                o_KMD.copy_(self._rotation.v.turn_back(layer, o_KMD))
        o_PKGND = o_PKMD.view(-1, heads, self._spec.group, PAGE, dim)
        return o_PKGND.permute(0, 3, 1, 2, 4).reshape(-1, self._spec.heads, dim)[: span.count]

    def _store_segment(self, layer: int, span: Span, first: int, kv_P2KND: Tensor) -> tuple[Tensor, Tensor | None]:
        """Write a segment's pages everywhere and fill its save points. Returns the band (the R pages before the segment
        and the segment) and the sink in float32; None for dense codecs."""
        self._pool.write_pages(layer, span.pages[first : first + len(kv_P2KND)], kv_P2KND)
        if self._recent is None:
            return kv_P2KND, None
        band_first = max(0, first - self._window_pages)
        # the old pages must be read first: a long segment overwrites what its own first pages still need
        before_P2KND = self._recent.read_pages(layer, span.slot, band_first, first - 1)
        band_P2KND = torch.cat((before_P2KND, kv_P2KND))
        self._recent.write_pages(layer, span.slot, first, kv_P2KND)
        for save in span.saves:
            end = save.position // PAGE
            start = max(0, end - self._window_pages)
            fill_window(save.into, layer, band_P2KND[start - band_first : end - band_first])
        return band_P2KND, self._recent.sink_rows(layer, span.slot)

    def _decode(self, layer: int, spans: Sequence[Span], q_TQD: Tensor, kv_T2KD: Tensor) -> Tensor:
        """Every product has the shape of one token or of one vector, so that a row's bits do not depend on its batch;
        what has no sums is done for all rows at once."""
        tokens = [_Token(span, span.start + i) for span in spans for i in range(span.count)]
        if (longest := max(span.count for span in spans)) > PAGE:
            raise ValueError(f"a decode row carries {longest} tokens; at most {PAGE} are allowed")
        q_TKGD = torch.unflatten(q_TQD, 1, (self._spec.kv_heads, -1))
        if self._rotation is not None:
            k_TK1D, v_TK1D = kv_T2KD.unsqueeze(3).unbind(1)
            kq_TKMD = self._rotation.k.turn_rows(layer, torch.cat((k_TK1D, q_TKGD), 2))
            v_TK1D = self._rotation.v.turn_rows(layer, v_TK1D)
            q_TKGD, kv_T2KD = kq_TKMD[:, :, 1:], torch.stack((kq_TKMD[:, :, 0], v_TK1D.squeeze(2)), 1)
        self._write_tokens(layer, tokens, kv_T2KD.to(self._pool.dtype))
        outputs = []
        for token, q_KGD in zip(tokens, q_TKGD, strict=True):
            history, recent_2KND = self._keys_of(layer, token)
            outputs.append(attend_token(self._pool, layer, history, q_KGD, recent_2KND))
        o_TKGD = torch.stack(outputs)
        if self._rotation is not None:
            o_TKGD = self._rotation.v.turn_rows_back(layer, o_TKGD)
        return o_TKGD.flatten(1, 2)

    def _write_tokens(self, layer: int, tokens: Sequence[_Token], kv_T2KD: Tensor) -> None:
        ids_T = torch.stack([token.span.pages[token.position // PAGE] for token in tokens])
        offsets_T = torch.tensor([token.position % PAGE for token in tokens], device=self._device)
        self._pool.write_tokens(layer, ids_T, offsets_T, kv_T2KD)
        if self._recent is None:
            return
        for token, kv_2KD in zip(tokens, kv_T2KD, strict=True):
            self._recent.write_token(layer, token.span.slot, token.position, kv_2KD)
        for span in {token.span.slot: token.span for token in tokens}.values():
            for save in span.saves:
                self._recent.save_window_of(layer, span.slot, save.into)

    def _keys_of(self, layer: int, token: _Token) -> tuple[Tensor, Tensor]:
        """What a query reads: the page ids of its history, and float32 rows of everything newer."""
        page, offset = divmod(token.position, PAGE)
        table = token.span.pages
        if self._recent is None:
            own_2KND = self._pool.read(layer, table[page : page + 1])
            return table[:page], own_2KND[:, :, : offset + 1]
        history = table[1 : max(1, page - self._window_pages)]
        return history, self._recent.token_rows(layer, token.span.slot, token.position)

    def read_pages(self, ids: Sequence[int] | Tensor) -> tuple[Tensor, ...]:
        """Copies of pages, all layers: tensors with the page axis at dimension 1, on the cache's device. `ids` that lie
        there already, as int64, cost no wait."""
        index = torch.as_tensor(ids, dtype=torch.int64, device=self._device)
        return tuple(pool.index_select(1, index) for pool in self._pool.tensors())

    def write_pages(self, ids: Sequence[int] | Tensor, pages: Sequence[Tensor]) -> None:
        """Put back what `read_pages` gave, under other ids if need be."""
        index = torch.as_tensor(ids, dtype=torch.int64, device=self._device)
        for pool, values in zip(self._pool.tensors(), pages, strict=True):
            pool.index_copy_(1, index, values.to(self._device))

    def new_window(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Zeroed `window_k`, `window_v` for a CheckpointTensors, on the cache's device; None for dense codecs."""
        if self._recent is None:
            return None, None
        spec = self._spec
        shape = (len(spec.full_layers), self._window_pages, spec.kv_heads, PAGE, spec.head_dim)
        return tuple(torch.zeros(shape, dtype=self._pool.dtype, device=self._device) for _ in range(2))  # type: ignore[return-value]

    def save_window(self, slot: int, checkpoint: CheckpointTensors) -> None:
        """Fill `checkpoint.window_k/v` with the R pages before its position, which must still be in the slot's ring:
        at most 64 tokens may have been stored since. Nothing to do for dense codecs."""
        if self._recent is not None:
            self._recent.save_window(slot, checkpoint)

    def load_window(self, slot: int, checkpoint: CheckpointTensors) -> None:
        """Make the slot continue at `checkpoint.position`. Nothing to do for dense codecs."""
        if self._recent is not None:
            self._recent.load_window(slot, checkpoint)

    def save_sink(self, slot: int) -> Tensor:
        """A copy of the slot's sink page, [full layers, 2 (K, V), kv_heads, 64, D] bf16; empty for dense codecs."""
        return torch.empty(0) if self._recent is None else self._recent.sink[:, slot].clone()

    def load_sink(self, slot: int, sink: Tensor) -> None:
        """Put a saved sink page into a slot. Nothing to do for dense codecs."""
        if self._recent is not None:
            self._recent.sink[:, slot] = sink.to(self._device)

    def bytes(self) -> KvBytes:
        """What is held now, by purpose."""
        recent, rotation = self._recent, self._rotation
        frames = (*rotation.k.tensors(), *rotation.v.tensors(), self._centres_L2KD) if rotation else ()
        return KvBytes(
            pages=_bytes(self._pool.tensors()),
            ring=_bytes((recent.ring,)) if recent else 0,
            sink=_bytes((recent.sink,)) if recent else 0,
            rotation=_bytes(frames),
            scratch=_bytes(
                (
                    *self._pool.scratch(),
                    *(recent.scratch() if recent else ()),
                    *(self._kernels.scratch() if self._kernels else ()),
                )
            ),
        )


def _to_pages(x_NAD: Tensor, pages: int) -> Tensor:
    """Tokens of a segment [N, ..., D] to whole pages [P, ..., 64, D], zeros behind the last token."""
    padded = x_NAD.new_zeros(pages * PAGE, *x_NAD.shape[1:])
    padded[: len(x_NAD)] = x_NAD
    return torch.unflatten(padded, 0, (pages, PAGE)).movedim(1, -2).contiguous()


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of distinct storages: an expanded tensor counts what it takes, one shared by two names counts once."""
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
