"""Residual rules: how blocks read the stream and write to it. The loop over layers knows nothing of what is inside.

A rule is declared by its kind (`arch/spec.py`); another one is a class here and a line in RULES.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kakera.model.loader import Loader
from kakera.ops.exchange import Exchange
from kakera.ops.norm import rms_norm


class Stream(Protocol):
    """The residual stream of one pass."""

    def read(self) -> Tensor:
        """x [T, H] for the next block, in the order of the reads that it was begun with."""
        ...

    def write(self, y_TH: Tensor) -> None:
        """What the block that has read last gives."""
        ...

    def finish(self) -> Tensor:
        """What head and draft layers take, [T, H]."""
        ...


class Rule(Protocol):
    """`weights`: of a read or of the finish, whatever `load` has made."""

    def load(self, loader: Loader, name: str) -> Tensor: ...

    def begin(self, x_TH: Tensor, reads: Sequence[Tensor], finish: Tensor, eps: float, exchange: Exchange) -> Stream:
        """From embeddings [T, H]. What a block gives is a rank's part of a sum, and every rank has the same stream."""
        ...


class AddNorm:
    """One stream; a block reads its norm and adds to it."""

    def load(self, loader: Loader, name: str) -> Tensor:
        return loader.norm(name)

    def begin(self, x_TH: Tensor, reads: Sequence[Tensor], finish: Tensor, eps: float, exchange: Exchange) -> Stream:
        return _Normed(x_TH, (*reads, finish), eps, exchange)


class _Normed:
    """Each sum has the norm of the next read beside it, and the sum over ranks inside, which on a GPU is one launch."""

    def __init__(self, x_TH: Tensor, scales: Sequence[Tensor], eps: float, exchange: Exchange):
        self._x_TH, self._scales, self._eps, self._exchange = x_TH, iter(scales), eps, exchange
        self._added_TH: Tensor | None = None

    def read(self) -> Tensor:
        scale_H = next(self._scales)
        if self._added_TH is None:
            return rms_norm(self._x_TH, scale_H, self._eps)
        self._x_TH, normed_TH = self._exchange.add_norm(self._x_TH, self._added_TH, scale_H, self._eps)
        self._added_TH = None
        return normed_TH

    def write(self, y_TH: Tensor) -> None:
        self._added_TH = y_TH

    finish = read


RULES: dict[str, Rule] = {"add_norm": AddNorm()}
