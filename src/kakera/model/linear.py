"""Linears and embeddings: what a layer calls, and the plain kinds of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kakera.ops.dense import linear_into
from kakera.ops.exchange import Exchange
from kakera.ops.linear import Weight, linear, pack


class LinearMap(Protocol):
    """x_TI [T, I] to [T, O], however the weight is kept; `decode_tokens` as in `kakera.ops.linear`."""

    def __call__(self, x_TI: Tensor, decode_tokens: int = 0) -> Tensor: ...


class EmbeddingMap(Protocol):
    """Tokens [T] to rows [T, H], however the table is kept."""

    def __call__(self, tokens_T: Tensor) -> Tensor: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...  # of the rows


@dataclass(frozen=True)
class Embedding:
    """A table in the model's dtype."""

    rows_VH: Tensor

    def __call__(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.rows_VH)

    @property
    def device(self) -> torch.device:
        return self.rows_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.rows_VH.dtype


@dataclass(frozen=True)
class SharedEmbedding:
    """A table of which every rank holds the rows of its `ids`: a rank has nothing to say of the others' tokens, and the
    sum over all ranks is exact."""

    table: EmbeddingMap
    ids: range
    exchange: Exchange

    def __call__(self, tokens_T: Tensor) -> Tensor:
        own_T = tokens_T - self.ids.start
        foreign_T = (own_T < 0) | (own_T >= len(self.ids))
        rows_TH = self.table(own_T.clamp(0, len(self.ids) - 1))
        return self.exchange.total(rows_TH.masked_fill(foreign_T[:, None], 0))

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype


@dataclass(frozen=True)
class Projection:
    """y = x w^T + b. bias_O: [O], or None, which costs nothing. The weight is plain, or opaque and fast."""

    weight_OI: Weight
    bias_O: Tensor | None = None

    def __call__(self, x_TI: Tensor, decode_tokens: int = 0) -> Tensor:
        """[T, O]; rows, layout and `decode_tokens` as in `kakera.ops.linear`."""
        y_TO = linear(x_TI, self.weight_OI, decode_tokens)
        return y_TO if self.bias_O is None else y_TO + self.bias_O


@dataclass(frozen=True)
class Linear(Projection):
    """A projection whose weight can be looked at: [O, I]."""

    weight_OI: Tensor

    def packed(self) -> Projection:
        """The same in the form that computes fastest."""
        return Projection(pack(self.weight_OI), self.bias_O)

    def into(self, x_TI: Tensor, y_TO: Tensor) -> None:
        """The projection of rows in one piece each, to where y_TO [T, O] lies: it may be part of longer rows."""
        linear_into(x_TI, self.weight_OI, y_TO)
        if self.bias_O is not None:
            y_TO += self.bias_O

    def rows(self, which: Tensor) -> Linear:
        """The output channels `which`, in that order."""
        return Linear(self.weight_OI[which], None if self.bias_O is None else self.bias_O[which])


def fused(parts: Sequence[Linear]) -> Linear:
    """Linears that read the same input as one, output channels in the order of `parts`; an absent bias is 0."""
    weight_OI = torch.cat([part.weight_OI for part in parts])
    if all(part.bias_O is None for part in parts):
        return Linear(weight_OI)
    biases = [weight_OI.new_zeros(len(p.weight_OI)) if p.bias_O is None else p.bias_O for p in parts]
    return Linear(weight_OI, torch.cat(biases))
