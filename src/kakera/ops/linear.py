"""Linears on a flat batch of rows, in the products at which a CPU's GEMM is fast, or repeatable.

* `w @ x.T` reads the weights near the memory's speed for few rows: 78M float32 weights on 2 cores of an AMD EPYC
  (AVX2, torch 2.13, MKL) take 17.8 ms for 2 rows and 21.5 ms for 4, where `F.linear` takes 42 and 49 ms, and 21.6 ms
  even for a single row. Few rows are padded to that. (Summing the weights once takes 11.6 ms.)
* A library chooses kernels, and how threads share the work, by the shape of a product, and a row's last bits follow.
  So rows that must be repeatable go through products of one shape: 64 rows, whatever the batch. (One product of a
  multiple of 16 rows was enough on the EPYC and is 15 % faster; on a Xeon with AVX-512 and 2 threads it was not.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 64


def linear(x_TI: Tensor, w_OI: Tensor, fast_rows: int = 0) -> Tensor:
    """x w^T, [T, O]. On a CPU perhaps a transposed view: whoever needs rows in one piece asks for them.

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
    return torch.mm(w_OI, x_NI.t()).t()[:count]


def linear_reference(x_TI: Tensor, w_OI: Tensor) -> Tensor:
    """One row at a time: what `linear` equals within rounding."""
    return torch.stack([torch.mv(w_OI, x_I) for x_I in x_TI])
