"""Softmax over keys that come in blocks: the online softmax, one state per block of query rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class ValueBlock(Protocol):
    """Values of one layer that can be mixed. B is kv_heads, M query rows, N keys."""

    def mix(self, p_BMN: Tensor) -> Tensor:
        """Values weighted by p: [B, M, D], float32."""
        ...


class PlainBlock:
    """Float32 keys and values, kv_2BND [2, B, N, D]. `mask_MN` is added to the logits of the last N keys."""

    def __init__(self, kv_2BND: Tensor, mask_MN: Tensor | None = None):
        self.k_BND, self.v_BND = kv_2BND
        self.mask_MN = mask_MN

    def scores(self, q_BMD: Tensor) -> Tensor:
        """Logits [B, M, N]."""
        scores_BMN = torch.bmm(q_BMD, self.k_BND.transpose(1, 2))
        if self.mask_MN is not None:
            scores_BMN[..., -self.mask_MN.shape[-1] :] += self.mask_MN
        return scores_BMN

    def mix(self, p_BMN: Tensor) -> Tensor:
        return torch.bmm(p_BMN, self.v_BND)


class OnlineSoftmax:
    """Running maximum, sum and weighted values of B x M query rows. The first block must give each row a finite logit.

    The result depends on how the keys are cut and in which order they come, to the last bit; whoever wants equal
    bits cuts by absolute position.
    """

    def __init__(self, scores_BMN: Tensor, block: ValueBlock):
        self._max_BM1 = scores_BMN.amax(-1, keepdim=True)
        p_BMN = scores_BMN.sub_(self._max_BM1).exp_()
        self._sum_BM1 = p_BMN.sum(-1, keepdim=True)
        self._out_BMD = block.mix(p_BMN)

    @staticmethod
    def join(states: Sequence[OnlineSoftmax]) -> OnlineSoftmax:
        """One state of all rows, in the order given, each behind the other along M."""
        return OnlineSoftmax._of(*(torch.cat(parts, 1) for parts in zip(*(s._parts() for s in states), strict=True)))

    def split(self, count: int) -> list[OnlineSoftmax]:
        """The inverse of `join` for `count` states of equally many rows; they share this one's memory."""
        parts = (part.chunk(count, 1) for part in self._parts())
        return [OnlineSoftmax._of(*part) for part in zip(*parts, strict=True)]

    @staticmethod
    def _of(max_BM1: Tensor, sum_BM1: Tensor, out_BMD: Tensor) -> OnlineSoftmax:
        state = OnlineSoftmax.__new__(OnlineSoftmax)
        state._max_BM1, state._sum_BM1, state._out_BMD = max_BM1, sum_BM1, out_BMD
        return state

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._max_BM1, self._sum_BM1, self._out_BMD

    def add(self, scores_BMN: Tensor, block: ValueBlock) -> None:
        """Take in further keys, given their logits, which are overwritten."""
        max_BM1 = torch.maximum(self._max_BM1, scores_BMN.amax(-1, keepdim=True))
        shrink_BM1 = (self._max_BM1 - max_BM1).exp_()
        p_BMN = scores_BMN.sub_(max_BM1).exp_()
        self._sum_BM1.mul_(shrink_BM1).add_(p_BMN.sum(-1, keepdim=True))
        self._out_BMD.mul_(shrink_BM1).add_(block.mix(p_BMN))
        self._max_BM1 = max_BM1

    def result(self) -> Tensor:
        """[B, M, D], float32."""
        return self._out_BMD / self._sum_BM1
