"""From a layer's projection to attention in one launch: QK-norm, RoPE, rotation, rounding, 2-bit codes, pages.

Reference: `ProjectedHeads.turned`, `kv.rotation.fast_hadamard` and `kv.codec.encode`, as `write_rows_reference`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.kv import codec
from kakera.kv.gpu.decode import LayerPages
from kakera.kv.gpu.finish import address
from kakera.kv.rotation import fast_hadamard
from kakera.ops.cuda.compiler import kernel
from kakera.ops.heads import ProjectedHeads

WARPS = 8
WARP_VALUES = 1024  # of a warp: one head of four tokens at 256 dims


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "q_scale", "k_scale", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("k_centre", "v_centre", "pages", "halves", "sinks", "offsets")),
        *((name, ctypes.c_void_p) for name in ("q_to", "codes", "params", "halves_to", "sinks_to")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "kv_heads", "row_stride", "pad")),
    ]


@dataclass(frozen=True)
class Places:
    """Where each token's key and value go, int32 [T] on the device.

    page_T: page of codes; half_T: 16-bit page, counted from the first of `LayerPages.halves`; sink_T: page of the sink;
    offset_T: row of all of them. A negative page: not stored there.
    """

    page_T: Tensor
    half_T: Tensor
    sink_T: Tensor
    offset_T: Tensor

    @staticmethod
    def of(*parts: Tensor) -> Places:
        """Of integers of any width."""
        return Places(*(part.int() for part in parts))


def can_write(head_dim: int, rotary_dim: int) -> bool:
    """Whether there is a kernel for heads of this kind."""
    return head_dim in (128, 256) and rotary_dim in (head_dim, head_dim // 2, head_dim // 4)


def write_rows(
    heads: ProjectedHeads, pages: LayerPages, places: Places, centres_2KD: Tensor | None, q_to_TQD: Tensor
) -> None:
    """Store keys and values of all tokens in `pages`, and their queries in q_to_TQD (fp16, times D^-0.5).

    The projection is fp16 or bf16. With coded pages queries, keys and values are in the Hadamard frame, keys and values
    less `centres_2KD` (float32 [2 (K, V), kv_heads, D]); pages of a bf16 cache have the model's own. Raises ValueError.
    """
    tokens, count, dim = heads.q_TQD.shape
    kv_heads, rotary_dim = heads.k_TKD.shape[1], 2 * heads.rotary.cos.shape[-1]
    if not can_write(dim, rotary_dim):
        raise ValueError(f"no kernel writes heads of {dim} dims of which {rotary_dim} are turned")
    if tokens > 1 and {x.stride(0) for x in (heads.k_TKD, heads.v_TKD)} != {heads.q_TQD.stride(0)}:
        raise ValueError("queries, keys and values must be views of one projection: their tokens lie differently apart")
    if q_to_TQD.dtype != torch.float16 or not q_to_TQD.is_contiguous():
        raise ValueError("queries go to a contiguous float16 tensor")
    group = 0 if pages.codes is None else dim // pages.groups
    launch = _Launch(
        q=heads.q_TQD.data_ptr(),
        k=heads.k_TKD.data_ptr(),
        v=heads.v_TKD.data_ptr(),
        q_scale=heads.q_scale_D.data_ptr(),
        k_scale=heads.k_scale_D.data_ptr(),
        cos=heads.rotary.cos.data_ptr(),
        sin=heads.rotary.sin.data_ptr(),
        pages=places.page_T.data_ptr(),
        halves=places.half_T.data_ptr(),
        sinks=places.sink_T.data_ptr(),
        offsets=places.offset_T.data_ptr(),
        q_to=q_to_TQD.data_ptr(),
        codes=address(pages.codes),
        params=address(pages.parameters),
        halves_to=pages.halves.data_ptr(),
        sinks_to=address(pages.sink),
        eps=heads.eps,
        tokens=tokens,
        heads=count,
        kv_heads=kv_heads,
        row_stride=heads.q_TQD.stride(0),
    )
    if group:
        assert centres_2KD is not None
        launch.k_centre, launch.v_centre = (centre_KD.data_ptr() for centre_KD in centres_2KD)
    defines = [f"DIM={dim}", f"ROTARY={rotary_dim}", f"GROUP={group}"]
    if heads.q_TQD.dtype == torch.bfloat16:
        defines.append("BF16")
    run = kernel("kv_write", 32 * WARPS, tuple(defines), q_to_TQD.device.index)
    units = -(-tokens * dim // WARP_VALUES) * (count + 2 * kv_heads)
    run.launch((-(-units // WARPS), 1), launch, dependent=True)


def write_rows_reference(
    heads: ProjectedHeads, pages: LayerPages, places: Places, centres_2KD: Tensor | None
) -> Tensor:
    """The same in plain torch; returns the queries in float32."""
    q_TQD, k_TKD, v_TKD = heads.turned()
    q_TQD = q_TQD.float() * q_TQD.shape[-1] ** -0.5
    kv_T2KD = torch.stack((k_TKD, v_TKD), 1).float()
    if pages.codes is not None and centres_2KD is not None:
        q_TQD, kv_T2KD = fast_hadamard(q_TQD), fast_hadamard(kv_T2KD - centres_2KD)
    kv_T2KD = kv_T2KD.to(codec.WINDOW_DTYPE)
    _store(pages.halves.view(-1, *pages.halves.shape[-4:]), -2, places.half_T, places, kv_T2KD)
    if pages.codes is not None:
        assert pages.parameters is not None
        rows = codec.encode(kv_T2KD, q_TQD.shape[-1] // pages.groups)
        _store(pages.codes, -2, places.page_T, places, rows.codes)
        _store(pages.parameters, -1, places.page_T, places, torch.stack((rows.scale, rows.minimum), -2))
        if pages.sink is not None:
            _store(pages.sink, -2, places.sink_T, places, kv_T2KD)
    return q_TQD


def _store(to_P: Tensor, token_axis: int, page_T: Tensor, places: Places, rows_T: Tensor) -> None:
    stored = page_T >= 0
    at = page_T[stored].long(), places.offset_T[stored].long()
    to_P.movedim(token_axis, 1)[at] = rows_T[stored]
