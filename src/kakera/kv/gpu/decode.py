"""Decode attention on a GPU over pages as they lie, coded or bf16. Reference: `kv.plain.attend.attend_token`.

Two launches: every thread block attends over an equal stretch of all rows' pages, then their results are merged and
turned back into the model's frame. Grids and scratch do not depend on lengths, so that a CUDA graph serves them all.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.kv.codec import Int2Rows, decode
from kakera.kv.gpu.finish import Finish, FinishArguments, address
from kakera.kv.store import pages_to_rows
from kakera.ops.cuda.compiler import kernel

MOST_ROWS = 256  # of a launch: their costs are summed in shared memory
MOST_GROUPS = 4  # groups of dims with a scale of their own: a quarter of the dims, at least, shares one
HEAD_DIMS = (128, 256)
WARPS = 8
COLUMNS = 8  # query tokens and heads of a tile: columns of the tensor core's product


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("starts", "offsets", "slots", "tables")),
        *((name, ctypes.c_int) for name in ("rows", "table_stride", "kv_heads", "group")),
        *((name, ctypes.c_int) for name in ("window", "tiles", "blocks", "pad")),
    ]


class _Decode(ctypes.Structure):
    _fields_ = [
        ("rows", _Rows),
        *((name, ctypes.c_void_p) for name in ("codes", "params", "halves", "sink", "q", "partial", "stats")),
    ]


class _Merge(ctypes.Structure):
    _fields_ = [
        ("rows", _Rows),
        *((name, ctypes.c_void_p) for name in ("partial", "stats")),
        ("finish", FinishArguments),
    ]


@dataclass(frozen=True)
class LayerPages:
    """Keys and values of one layer, all contiguous on one device.

    codes: uint8 [P, 2 (K, V), kv_heads, 64, D / 4] and parameters: fp16 [P, 2, kv_heads, 2 (scale, minimum), groups,
    64]; None for a bf16 cache. halves: bf16, the window rings [S, R + 2, 2, kv_heads, 64, D], or the pages [P, 2, ...]
    of a bf16 cache. sink: bf16 [S, 2, kv_heads, 64, D], or None.
    """

    codes: Tensor | None
    parameters: Tensor | None
    halves: Tensor
    sink: Tensor | None

    @property
    def window_pages(self) -> int:
        return self.halves.shape[1] - 2 if self.codes is not None else 0

    @property
    def head_dim(self) -> int:
        return self.halves.shape[-1]

    @property
    def groups(self) -> int:
        return 1 if self.parameters is None else self.parameters.shape[4]


@dataclass(frozen=True)
class DecodeRows:
    """Rows of a decode batch, int32 on the device. Row r has the query tokens offsets[r] .. offsets[r + 1] - 1, which
    stand at the positions starts[r] .., and may have none.

    starts_R, slots_R: [rows]; offsets: [rows + 1]; tables_RP: page ids, [rows, pages]. most_tokens: of a row; tokens:
    of all. Both may be more than there are, as in a graph: query tokens from offsets[rows] on get no result.
    """

    starts_R: Tensor
    offsets: Tensor
    slots_R: Tensor
    tables_RP: Tensor
    most_tokens: int
    tokens: int

    def __post_init__(self) -> None:
        if len(self.starts_R) > MOST_ROWS:
            raise ValueError(f"{len(self.starts_R)} rows in a decode batch; a launch takes {MOST_ROWS}")
        if self.most_tokens > PAGE:
            raise ValueError(f"a decode row carries {self.most_tokens} tokens; at most {PAGE} are allowed")


@dataclass(frozen=True)
class DecodeScratch:
    """What thread blocks leave: fp32 sums and (max, sum) of each query tile. All layers in turn, on one stream."""

    partial: Tensor
    stats: Tensor
    blocks: int

    @staticmethod
    def allocate(rows: int, tiles: int, kv_heads: int, head_dim: int, device: torch.device) -> DecodeScratch:
        """`tiles` of a row: `query_tiles`."""
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        left = blocks + rows * tiles * kv_heads
        return DecodeScratch(
            partial=torch.empty(left, COLUMNS, head_dim, dtype=torch.float32, device=device),
            stats=torch.empty(left, COLUMNS, 2, dtype=torch.float32, device=device),
            blocks=blocks,
        )


def query_tiles(tokens: int, group: int) -> int:
    """Tiles of a row of `tokens` query tokens with `group` query heads a KV head."""
    return -(-tokens * group // COLUMNS)


def can_decode(head_dim: int, groups: int) -> bool:
    """Whether there is a kernel for pages of this kind."""
    return head_dim in HEAD_DIMS and groups <= MOST_GROUPS


def attend_decode(
    pages: LayerPages,
    rows: DecodeRows,
    q_TQD: Tensor,
    finish: Finish,
    scratch: DecodeScratch,
) -> None:
    """Attention of all query tokens, finished (`finish.py`).

    q_TQD: fp16, contiguous, in the keys' frame, times D^-0.5. The rows' own keys and values must have been stored.
    Raises ValueError for shapes without a kernel.
    """
    tokens, heads, dim = q_TQD.shape
    kv_heads = pages.halves.shape[-3]
    if not can_decode(dim, pages.groups):
        raise ValueError(f"no decode kernel for head_dim {dim} with {pages.groups} groups")
    if q_TQD.dtype != torch.float16 or not q_TQD.is_contiguous():
        raise ValueError(f"queries must be contiguous float16, not {q_TQD.dtype} with strides {q_TQD.stride()}")
    tiles = query_tiles(rows.most_tokens, heads // kv_heads)
    if len(scratch.partial) < scratch.blocks + len(rows.starts_R) * tiles * kv_heads:
        raise ValueError(f"the scratch is too small for {len(rows.starts_R)} rows of {rows.most_tokens} tokens")
    shared = _Rows(
        starts=rows.starts_R.data_ptr(),
        offsets=rows.offsets.data_ptr(),
        slots=rows.slots_R.data_ptr(),
        tables=rows.tables_RP.data_ptr(),
        rows=len(rows.starts_R),
        table_stride=rows.tables_RP.stride(0),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        window=pages.window_pages,
        tiles=tiles,
        blocks=scratch.blocks,
    )
    coded = int(pages.codes is not None)
    launch = _Decode(rows=shared, halves=pages.halves.data_ptr(), q=q_TQD.data_ptr())
    launch.codes, launch.params, launch.sink = map(address, (pages.codes, pages.parameters, pages.sink))
    launch.partial, launch.stats = scratch.partial.data_ptr(), scratch.stats.data_ptr()
    shape = (f"DIM={dim}", f"CODES={coded}")
    defines = (*shape, f"GROUPS={pages.groups}", f"WARPS={WARPS}")
    run = kernel("attention_decode", 32 * WARPS, defines, q_TQD.device.index)
    run.launch((scratch.blocks, 1), launch, dependent=True)

    merge = _Merge(rows=shared, partial=launch.partial, stats=launch.stats, finish=finish.arguments())
    run = kernel("attention_merge", 256, (*shape, *finish.defines()), q_TQD.device.index)
    run.launch((tokens, heads), merge, dependent=True)


def attend_decode_reference(pages: LayerPages, rows: DecodeRows, q_TQD: Tensor) -> Tensor:
    """The same token by token in float64, before the output is turned back: [T, heads, D]."""
    o_TQD = torch.empty_like(q_TQD, dtype=torch.float64)
    for r, start in enumerate(rows.starts_R.tolist()):
        for i, token in enumerate(range(*rows.offsets[r : r + 2].tolist())):
            k_KND, v_KND = _keys_of(pages, rows.tables_RP[r], int(rows.slots_R[r]), start + i).double()
            q_KGD = torch.unflatten(q_TQD[token].double(), 0, (len(k_KND), -1))
            o_TQD[token] = (torch.softmax(q_KGD @ k_KND.mT, -1) @ v_KND).flatten(0, 1)
    return o_TQD


def _keys_of(pages: LayerPages, table: Tensor, slot: int, position: int) -> Tensor:
    """float32 [2, kv_heads, position + 1, D]: what a query there reads."""
    page = position // PAGE
    table = table[: page + 1].long()
    if pages.codes is None:
        return pages_to_rows(pages.halves[table])[:, :, : position + 1]
    assert pages.parameters is not None and pages.sink is not None
    low = max(0, page - pages.window_pages)
    scale, minimum = pages.parameters[table[:low]].movedim(-1, 3).unbind(4)
    coded = pages_to_rows(decode(Int2Rows(pages.codes[table[:low]], scale, minimum)))
    if low:
        coded[:, :, :PAGE] = pages.sink[slot].float()
    places = torch.arange(low, page + 1, device=table.device) % pages.halves.shape[1]
    recent = pages_to_rows(pages.halves[slot, places])
    return torch.cat((coded, recent), 2)[:, :, : position + 1]
