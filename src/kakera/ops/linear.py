"""Linears on a flat batch of rows, in the products at which a CPU's GEMM is fast, or repeatable.

* Few rows are bound by reading the weights. So a CPU holds them in fp16, in FBGEMM's block order, and multiplies in
  float32: 78M weights on two cores of an AMD EPYC (AVX2, torch 2.13) take 8 ms for 1 row, 10 for 4 and 15 for 8;
  float32 in oneDNN's order takes 15, 18 and 23, MKL's `w @ x.T` 15, 15 and 26. Reading them as float32 takes 10.
* A library chooses kernels, and how threads share the work, by the shape of a product, and a row's last bits follow.
  So rows that must be repeatable go through products of one shape: 64 rows, whatever the batch. (FBGEMM gives other
  bits for 1, 2, 7, 14, 31 ... rows than for 64, at any number of threads.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 64
FP16_MAX = 65504.0

Weight = Tensor | torch.ScriptObject  # plain [O, I], or what `pack` made of it


def pack(w_OI: Tensor) -> Weight:
    """A float32 weight on a CPU rounded to fp16, in FBGEMM's block order; any other weight itself.

    The result is opaque: it goes to `linear`, nothing else. A weight beyond the range of fp16 stays plain, and so do
    all where torch is built without FBGEMM (on ARM).
    """
    if w_OI.device.type != "cpu" or w_OI.dtype != torch.float32 or "fbgemm" not in _engines():
        return w_OI
    if w_OI.abs().max() > FP16_MAX:
        return w_OI
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack_fp16(w_OI, None)
    return packed


def linear(x_TI: Tensor, weight: Weight, decode_tokens: int = 0) -> Tensor:
    """x w^T, [T, O]. On a CPU perhaps a transposed view: whoever needs rows in one piece asks.

    The first `decode_tokens` rows are computed the fast way. The bits of every other row depend on nothing but
    the row, the weight and the number of threads. On a GPU there is no such promise, and one product for all rows.
    """
    if x_TI.device.type != "cpu":
        assert isinstance(weight, Tensor)
        return F.linear(x_TI, weight)
    if decode_tokens == len(x_TI):
        return _product(x_TI, weight)
    parts = [_product(x_TI[:decode_tokens], weight)] if decode_tokens else []
    parts += [_block(block_NI, weight) for block_NI in torch.split(x_TI[decode_tokens:], BLOCK_ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _block(x_NI: Tensor, weight: Weight) -> Tensor:
    """At most 64 rows, as 64."""
    return _product(F.pad(x_NI, (0, 0, 0, BLOCK_ROWS - len(x_NI))), weight)[: len(x_NI)]


def _product(x_NI: Tensor, weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return torch.mm(weight, x_NI.t()).t()
    y_NO: Tensor = torch.ops.quantized.linear_dynamic_fp16(x_NI, weight)
    return y_NO


def _engines() -> list[str]:
    return torch.backends.quantized.supported_engines


def linear_reference(x_TI: Tensor, w_OI: Tensor) -> Tensor:
    """One row at a time, from a plain weight: what `linear` equals within rounding."""
    return torch.stack([torch.mv(w_OI, x_I) for x_I in x_TI])
