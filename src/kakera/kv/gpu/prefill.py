"""Prefill attention on a GPU over INT2 or bf16 pages. Reference: `kv.plain.attend.attend_prefill`.

What every query of a segment reads as history is one dense, unmasked block: unpacked to fp16 piece by piece, and
multiplied by a library. A long segment's own history goes the same way for blocks of SUB queries. The rest, the
diagonal band, is one kernel, which also merges. Products have fp16 operands and fp32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.kv.gpu import dense_attention, prefill_kernels
from kakera.plan.prefill_plan import (
    GRID,
    SUB,
    PrefillPlan,
    key_pieces,
    library_shapes,
    padded_tokens,
    query_blocks,
)

MERGE_ROWS = 16


class Pages(NamedTuple):
    """Some pages of a sequence and where their rows go; `heads` from `head` on."""

    first: int
    number: int
    head: int
    heads: int


@dataclass(frozen=True)
class Int2History:
    """One layer's pages. codes: uint8 [P, 2, K, 64, D / 4]; parameters: fp16 [P, 2, K, 2, groups, 64]; sink: bf16
    [2, K, 64, D], which stands for page 0."""

    codes: Tensor
    parameters: Tensor
    sink: Tensor

    def fill(self, rows_2KND: Tensor, table: Tensor, pages: Pages) -> None:
        """Rows of the given pages, contiguous fp16 [2, heads, pages * 64, D]."""
        _, _, kv_heads, _, quarter = self.codes.shape
        grid = (pages.number, 2 * pages.heads)
        prefill_kernels.unpack_int2[grid](
            self.codes,
            self.parameters,
            table,
            rows_2KND,
            pages.first,
            rows_2KND.shape[2],
            pages.head,
            self.codes.stride(0),
            self.parameters.stride(0),
            KV_HEADS=kv_heads,
            HEADS=pages.heads,
            D=4 * quarter,
            GROUP=4 * quarter // self.parameters.shape[4],
        )
        if pages.first == 0:
            copy_pages(self.sink.unsqueeze(0), None, rows_2KND, pages._replace(number=1), PAGE)


@dataclass(frozen=True)
class Bf16History:
    """One layer's pages, bf16 [P, 2, K, 64, D]; those of the segment are written already."""

    pages: Tensor

    def fill(self, rows_2KND: Tensor, table: Tensor, pages: Pages) -> None:
        copy_pages(self.pages, table, rows_2KND, pages, pages.number * PAGE)


def copy_pages(source_P2KND: Tensor, table: Tensor | None, rows_2KND: Tensor, pages: Pages, limit: int) -> None:
    """fp16 rows of bf16 pages; zeros from row `limit` on."""
    prefill_kernels.copy_pages[(pages.number, 2 * pages.heads)](
        source_P2KND,
        source_P2KND if table is None else table,
        rows_2KND,
        pages.first,
        rows_2KND.shape[2],
        limit,
        pages.head,
        source_P2KND.stride(0),
        KV_HEADS=source_P2KND.shape[2],
        HEADS=pages.heads,
        D=source_P2KND.shape[4],
        HAS_TABLE=table is not None,
    )


class PrefillAttention:
    """Scratch of one device, for all layers in turn on one stream."""

    def __init__(self, plan: PrefillPlan, device: torch.device):
        self.plan = plan
        self._attend = dense_attention.choose(device)
        self._tile = _Tile.of(device, plan.head_dim)
        rows, dim = plan.query_slots * plan.group, plan.head_dim
        allocate = partial(torch.empty, device=device)
        self._q = allocate(rows * dim, dtype=torch.float16)
        self._state_o = allocate(rows * dim, dtype=torch.float32)
        self._state_lse = allocate(rows, dtype=torch.float32)
        self._history = allocate(2 * plan.history_slots * dim, dtype=torch.float16)
        self._band = allocate(2 * plan.band_slots * dim, dtype=torch.float16)

    def scratch(self) -> tuple[Tensor, ...]:
        return self._q, self._state_o, self._state_lse, self._history, self._band

    def prepare(self) -> None:
        """Compile what only long histories need, and have the library make its plans for all shapes that calls can
        take; else the first of each is slow."""
        nothing = 0, 0, 0, 1, 1  # no rows
        scratch = self._q, self._state_lse, self._state_o, self._state_lse
        prefill_kernels.merge[(1, 1)](*scratch, *nothing, D=self.plan.head_dim, BLOCK=MERGE_ROWS)
        if not dense_attention.makes_plans(self._q.device):
            return
        for batch, rows, keys in sorted(library_shapes(self.plan)):
            q_BMD = _view(self._q, batch, rows, self.plan.head_dim)
            k_BND = _view(self._history, batch, keys, self.plan.head_dim)
            self._attend(q_BMD, k_BND, k_BND)

    def __call__(
        self,
        history: Int2History | Bf16History,
        table: Tensor,
        start: int,
        q_TQD: Tensor,
        band_P2KND: Tensor | None,
        out_TQD: Tensor,
    ) -> None:
        """Attention of the tokens start, start + 1, ... into out_TQD (fp32 or fp16), in the frame of the values.

        q_TQD: fp16, scaled. table: page ids, int32 or int64, on the device. band_P2KND: the R pages before the
        segment (or all, if fewer) and its own, bf16; None for Bf16History. Pages and rows that no query may see
        are not read, or do not matter. Raises ValueError for a start off the page grid and for too long a segment.
        """
        tokens = len(q_TQD)
        if start % PAGE or not 1 <= tokens <= self.plan.chunk:
            raise ValueError(
                f"a segment of {tokens} tokens from {start}: this scratch takes 1 to {self.plan.chunk} tokens "
                f"that start on a multiple of {PAGE}"
            )
        heads = self.plan.heads_per_call(tokens)
        for head in range(0, self.plan.kv_heads, heads):
            segment = _Segment(self, head, heads, start, tokens)
            segment.fold(q_TQD)
            segment.take_history(history, table)
            segment.finish(history, table, band_P2KND, out_TQD)


class _Segment:
    """One call for some of the KV heads."""

    def __init__(self, owner: PrefillAttention, head: int, heads: int, start: int, tokens: int):
        plan = owner.plan
        self._owner, self._plan = owner, plan
        self._head, self._heads, self._start, self._tokens = head, heads, start, tokens
        self._rows = padded_tokens(tokens) * plan.group
        shape = (heads, self._rows, plan.head_dim)
        self._q_KMD = _view(owner._q, *shape)
        self._state_o_KMD = _view(owner._state_o, *shape)
        self._state_lse_KM = _view(owner._state_lse, *shape[:2])
        self._first, self._last = start // PAGE, (start + tokens - 1) // PAGE
        self._common = self._covered(start)  # history of every query, which the library takes for all at once
        self._own_KND = self._unpacked(max(0, self._last - plan.window_pages) * PAGE - self._common)

    def fold(self, q_TQD: Tensor) -> None:
        """Queries to rows; zeros behind the last, which the library gets too."""
        plan = self._plan
        q_KTGD = torch.unflatten(q_TQD, 1, (plan.kv_heads, plan.group)).transpose(0, 1)
        count = self._tokens * plan.group
        to_KTGD = torch.unflatten(self._q_KMD[:, :count], 1, (self._tokens, plan.group))
        to_KTGD.copy_(q_KTGD[self._head : self._head + self._heads])
        self._q_KMD[:, count:].zero_()

    def take_history(self, history: Int2History | Bf16History, table: Tensor) -> None:
        """All that the library takes, into the state. Leaves the segment's own history unpacked."""
        for first, count in key_pieces(self._common, self._plan.piece(self._heads)):
            rows_2KND = self._unpacked(count)
            history.fill(rows_2KND, table, self._pages(first, count))
            for query, size in query_blocks(self._tokens):
                self._take(query, size, rows_2KND, first == 0)
        rows_2KND = self._own_KND
        if rows_2KND.shape[2]:
            history.fill(rows_2KND, table, self._pages(self._common, rows_2KND.shape[2]))
        for block in range(SUB, self._tokens, SUB):
            end = self._covered(self._start + block)
            for first, count in key_pieces(end - self._common, self._plan.piece(self._heads)):
                for query, size in query_blocks(min(SUB, self._tokens - block), SUB):
                    piece_2KND = rows_2KND[:, :, first : first + count]
                    self._take(block + query, size, piece_2KND, self._common + first == 0)

    def finish(
        self, history: Int2History | Bf16History, table: Tensor, band_P2KND: Tensor | None, out_TQD: Tensor
    ) -> None:
        """The diagonal, merged with the state."""
        plan, tile = self._plan, self._owner._tile
        band_page = max(0, self._first - plan.window_pages)
        count = self._last + 1 - band_page
        band_2KND = _view(self._owner._band, 2, self._heads, count * PAGE, plan.head_dim)
        limit = self._start + self._tokens - band_page * PAGE
        if isinstance(history, Bf16History):
            copy_pages(history.pages, table, band_2KND, Pages(band_page, count, self._head, self._heads), limit)
        else:
            assert band_P2KND is not None and len(band_P2KND) >= count
            copy_pages(band_P2KND, None, band_2KND, Pages(0, count, self._head, self._heads), limit)
        rows = self._tokens * plan.group
        prefill_kernels.diagonal[(triton.cdiv(rows, tile.rows), self._heads)](
            self._q_KMD,
            self._own_KND,
            band_2KND,
            self._state_o_KMD,
            self._state_lse_KM,
            out_TQD,
            rows,
            self._rows,
            self._start,
            self._common,
            self._own_KND.shape[2],
            band_page * PAGE,
            count * PAGE,
            self._head,
            out_TQD.stride(0),
            HEADS=self._heads,
            G=plan.group,
            D=plan.head_dim,
            R=plan.window_pages,
            SUB=SUB,
            GRID=GRID,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _take(self, query: int, size: int, rows_2KND: Tensor, first: bool) -> None:
        """Some query tokens and some history to the library, and the result to the state."""
        group, keys = self._plan.group, rows_2KND.shape[2]
        splits = self._plan.splits(self._heads, size, keys)
        q_BMD = self._q_KMD[:, query * group : (query + size) * group]
        if splits > 1:
            q_BMD = q_BMD.repeat_interleave(splits, 0)
        k_BND, v_BND = (torch.unflatten(x_KND, 1, (splits, -1)).flatten(0, 1) for x_KND in rows_2KND)
        o_BMD, lse_BM = self._owner._attend(q_BMD, k_BND, v_BND)
        prefill_kernels.merge[(triton.cdiv(size * group, MERGE_ROWS), self._heads)](
            o_BMD.contiguous(),
            lse_BM.contiguous(),
            self._state_o_KMD,
            self._state_lse_KM,
            size * group,
            query * group,
            self._rows,
            splits,
            int(first),
            D=self._plan.head_dim,
            BLOCK=MERGE_ROWS,
        )

    def _covered(self, token: int) -> int:
        """Keys that the library takes for queries from `token` on."""
        return max(0, token - self._plan.window_pages * PAGE) // GRID * GRID

    def _pages(self, token: int, count: int) -> Pages:
        return Pages(token // PAGE, count // PAGE, self._head, self._heads)

    def _unpacked(self, tokens: int) -> Tensor:
        return _view(self._owner._history, 2, self._heads, tokens, self._plan.head_dim)


class _Tile(NamedTuple):
    """Rows and keys of a tile of the diagonal kernel, warps, stages of its loads."""

    rows: int
    keys: int
    warps: int
    stages: int

    @staticmethod
    def of(device: torch.device, head_dim: int) -> _Tile:
        if device.type != "cuda":
            return _Tile(64, 32, 4, 1)
        return tile_of(torch.cuda.get_device_capability(device)[0], head_dim)


def tile_of(major: int, head_dim: int) -> _Tile:
    """The largest that does not spill in the kernel's loops: 192 KB of shared memory on Hopper, 68 elsewhere."""
    if major in (9, 10):
        return _Tile(128, 64, 8, 2)
    return _Tile(64, 32, 8 if head_dim > 128 else 4, 2)


def _view(flat: Tensor, *shape: int) -> Tensor:
    count = 1
    for n in shape:
        count *= n
    return flat[:count].view(shape)
