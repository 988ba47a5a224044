"""What the ranks of one model tell each other while they compute: the interface, and the rank that is alone.

A rank holds a part of every linear. What reads a part of its inputs gives a partial result, and the sum over all ranks
goes into the residual stream in the call that adds and norms it: the stream is replicated, to the bit. Rank 0 speaks:
it has whole logits, and its tokens go to the others.

Implementations: `exchange_cards.py` (two cards, by a kernel through host memory), `exchange_plain.py` (on a CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kakera.ops.fused import add_rms_norm
from kakera.ops.norm import rms_norm


class Exchange(Protocol):
    """One rank's side. All ranks make the same calls in the same order, with tensors of the same shapes and dtypes.

    A rank that waits in vain, or whose peers do something else, leaves within a bounded time: on a CPU with RanksApart,
    on a card with outputs that are not written, of which `check` tells. Nothing that was computed since counts then.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture its calls."""
        ...

    def add_norm(self, x_TH: Tensor, delta_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x plus the deltas of all ranks, and its RMS norm times `scale_H`, as `exchange_norm_reference`: the sum has
        the same bits on every rank."""
        ...

    def total(self, x_TH: Tensor) -> Tensor:
        """The sum over all ranks, as `total_reference`, with the same bits on every rank."""
        ...

    def gather(self, part_RV: Tensor, widths: Sequence[int]) -> Tensor:
        """On rank 0 the parts of all ranks behind each other, [R, sum of `widths`]; on the others [R, 0]. `widths`: of
        the parts, by rank."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """To one rank, which calls `receive` with a tensor of x's shape and dtype."""
        ...

    def receive(self, into: Tensor, sender: int) -> None:
        """What `sender` has sent to this rank."""
        ...

    def meet(self) -> None:
        """Wait until every rank is here: the hosts, at the beginning of a step. Raises RanksApart."""
        ...

    def abort(self, why: str) -> None:
        """Have whoever waits, on any rank, leave at once. May be called by any thread, at any time, twice."""
        ...

    def check(self) -> None:
        """Raises RanksApart if an exchange has failed; on a card this is known once its work is done."""
        ...


def exchange_norm_reference(
    x_TH: Tensor, parts_TH: Sequence[Tensor], scale_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x plus the partial sums of all ranks in their order, rounded once, and its RMS norm times `scale_H` (float32),
    both in x's dtype."""
    sum_TH = (_wide(x_TH) + _sum(parts_TH)).to(x_TH.dtype)
    return sum_TH, rms_norm(sum_TH, scale_H, eps)


def total_reference(parts: Sequence[Tensor]) -> Tensor:
    """p0 + p1 + ... in that order, rounded once."""
    return _sum(parts).to(parts[0].dtype)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = _wide(parts[0])
    for part in parts[1:]:
        total = total + _wide(part)
    return total


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Alone:
    """The only rank of a model: nothing is exchanged, and nothing costs anything."""

    rank, ranks = 0, 1
    capturable = True

    def add_norm(self, x_TH: Tensor, delta_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x_TH, delta_TH, scale_H, eps)

    def total(self, x_TH: Tensor) -> Tensor:
        return x_TH

    def gather(self, part_RV: Tensor, widths: Sequence[int]) -> Tensor:
        return part_RV

    def send(self, x: Tensor, to: int) -> None:
        raise ValueError(f"there is no rank {to}: this one is alone")

    def receive(self, into: Tensor, sender: int) -> None:
        raise ValueError(f"there is no rank {sender}: this one is alone")

    def meet(self) -> None: ...

    def abort(self, why: str) -> None: ...

    def check(self) -> None: ...


ALONE = Alone()
