"""Linears on a flat batch of rows, in the products at which a CPU's GEMM is fast, or repeatable.

* Few rows are bound by reading the weights, and no plain product reads them at the memory's speed. oneDNN does, from
  weights in its own block order: 78M float32 weights on one core of an AMD EPYC (AVX2, torch 2.13) take 20.6 ms for 2
  rows, 31.6 for 4 and 39.5 for 8; MKL's `w @ x.T` takes 30, 55 and 65 ms, `F.linear` more. `pack` brings them there.
* A library chooses kernels, and how threads share the work, by the shape of a product, and a row's last bits follow.
  So rows that must be repeatable go through products of one shape: 64 rows, whatever the batch. (One product of a
  multiple of 16 rows was enough on the EPYC and is 15 % faster; on a Xeon with AVX-512 and 2 threads it was not.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 64


def pack(w_OI: Tensor) -> Tensor:
    """The weight in oneDNN's block order where that exists (a float32 weight on a CPU), else the weight itself.

    The result is opaque: it has a shape and goes to `linear`, nothing else. The operators are the ones that torch's
    own CPU compiler uses; a build of torch without oneDNN keeps plain weights.
    """
    if w_OI.device.type != "cpu" or w_OI.dtype != torch.float32 or not torch._C._has_mkldnn:
        return w_OI
    packed_OI: Tensor = torch.ops.mkldnn._reorder_linear_weight(w_OI.contiguous(), BLOCK_ROWS)
    return packed_OI


def linear(x_TI: Tensor, w_OI: Tensor, fast_rows: int = 0) -> Tensor:
    """x w^T, [T, O]; `w_OI` plain or packed. On a CPU perhaps a transposed view: whoever needs rows in one piece asks.

    The first `fast_rows` rows (decode) are computed the fast way. The bits of every other row depend on nothing but
    the row, the weight and the number of threads. On a GPU there is no such promise, and one product for all rows.
    """
    if x_TI.device.type != "cpu":
        return F.linear(x_TI, w_OI)
    if fast_rows == len(x_TI):
        return _product(x_TI, w_OI, few_rows(fast_rows))
    parts = [_product(x_TI[:fast_rows], w_OI, few_rows(fast_rows))] if fast_rows else []
    parts += [_product(block_NI, w_OI, BLOCK_ROWS) for block_NI in torch.split(x_TI[fast_rows:], BLOCK_ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def few_rows(rows: int) -> int:
    """The row count at which `rows` rows are computed fastest: 2, 4, 8, or a multiple of 16."""
    return next((few for few in (2, 4, 8) if rows <= few), -(-rows // 16) * 16)


def _product(x_NI: Tensor, w_OI: Tensor, rows: int) -> Tensor:
    count = len(x_NI)
    if count < rows:
        x_NI = F.pad(x_NI, (0, 0, 0, rows - count))
    if w_OI.is_mkldnn:
        y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, w_OI, None, "none", [], "")
        return y_NO[:count]
    return torch.mm(w_OI, x_NI.t()).t()[:count]


def linear_reference(x_TI: Tensor, w_OI: Tensor) -> Tensor:
    """One row at a time, from a plain weight: what `linear` equals within rounding."""
    return torch.stack([torch.mv(w_OI, x_I) for x_I in x_TI])
