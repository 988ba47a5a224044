"""Linears and embeddings of a GPU whose weights stay as they are stored: trellis codes and int8 rows.

A CPU decodes at load instead; there they would cost more to read than decoded ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.model.linear import Linear
from kakera.ops.int8 import int8_linear, int8_rows
from kakera.ops.trellis import TrellisLinear, TrellisScratch

ROW_ALIGN = 8  # values: kernels store 8 bytes at a time, libraries like 16


@dataclass(frozen=True)
class CodedProjection:
    """Coded linears of one input, a launch for each codebook in a row, then plain ones of the same input (`tail`),
    outputs behind each other.

    bias_O: of the coded ones.
    """

    coded: tuple[TrellisLinear, ...]
    scratch: TrellisScratch
    tail: Linear | None = None
    bias_O: Tensor | None = None

    def __call__(self, x_TI: Tensor, decode_tokens: int = 0) -> Tensor:
        """[T, O] in x's dtype, float16 or bfloat16."""
        x_TI = x_TI.contiguous()
        widths = [linear.out_channels for linear in self.coded]
        width = sum(widths)
        total = width + (0 if self.tail is None else len(self.tail.weight_OI))
        y_TO = x_TI.new_empty(len(x_TI), -(-total // ROW_ALIGN) * ROW_ALIGN)[:, :total]
        if self.tail is not None:
            self.tail.into(x_TI, y_TO[:, width:])
        coded_TO = y_TO[:, :width]
        for linear, own_TO in zip(self.coded, torch.split(coded_TO, widths, dim=1), strict=True):
            y_PTO = torch.split(own_TO, [part.out_channels for part in linear.parts], dim=1)
            linear.into(x_TI, y_PTO, self.scratch)
        if self.bias_O is not None:
            coded_TO += self.bias_O
        return y_TO


@dataclass(frozen=True)
class Int8Projection:
    """y = x w^T with int8 rows: q_OI int8, scale_O float16."""

    q_OI: Tensor
    scale_O: Tensor

    def __call__(self, x_TI: Tensor, decode_tokens: int = 0) -> Tensor:
        return int8_linear(x_TI.contiguous(), self.q_OI, self.scale_O)


@dataclass(frozen=True)
class Int8Embedding:
    """Rows looked up as they are stored: q_VH int8, scale_V float16."""

    q_VH: Tensor
    scale_V: Tensor
    dtype: torch.dtype

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """[T, H]."""
        return int8_rows(self.q_VH, self.scale_V, tokens_T, self.dtype)

    @property
    def device(self) -> torch.device:
        return self.q_VH.device
