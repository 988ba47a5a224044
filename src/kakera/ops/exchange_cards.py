"""CardExchange: everything that two cards tell each other, by the one kernel that sums and norms (`exchange_host.py`).

A sum with zeros is exact in any dtype, so what one rank has to say and the other has not is a sum, too: its part of the
logits beside zeros, a token's bytes as numbers below 256. That costs a few microseconds more than a one-way copy would
(logits of a row 26 us for 248,320 of them) and needs no second protocol to be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kakera.errors import RanksApart

RANKS = 2


class Adder(Protocol):
    """The kernel: see `exchange_host.HostExchange`. At most `rows` rows of `channels` channels at a time."""

    @property
    def rows(self) -> int: ...

    @property
    def channels(self) -> int: ...

    def add_norm_into(
        self, x_TH: Tensor, delta_TH: Tensor, scale_H: Tensor, eps: float, sum_TH: Tensor, y_TH: Tensor
    ) -> None: ...

    def abort(self) -> None: ...

    @property
    def failure(self) -> str: ...


class Hosts(Protocol):
    """How the processes of ranks meet: see `exchange.Exchange`."""

    def meet(self) -> None: ...

    def abort(self, why: str) -> None: ...

    def check(self) -> None: ...


class CardExchange:
    """Implements Exchange for one of two ranks. `dtype`: of the activations, 16 bit, on `device`."""

    ranks = RANKS
    capturable = True

    def __init__(self, adder: Adder, rank: int, hosts: Hosts, dtype: torch.dtype, device: torch.device):
        self.rank = rank
        self._adder, self._hosts = adder, hosts
        shape = adder.rows, adder.channels
        self._zeros_TH, self._unread_TH = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._ones_H = torch.ones(adder.channels, device=device)

    def add_norm(self, x_TH: Tensor, delta_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TH, delta_TH = x_TH.contiguous(), delta_TH.contiguous()
        sum_TH, y_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
        for rows in self._pieces(len(x_TH)):
            self._adder.add_norm_into(x_TH[rows], delta_TH[rows], scale_H, eps, sum_TH[rows], y_TH[rows])
        return sum_TH, y_TH

    def total(self, x_TH: Tensor) -> Tensor:
        x_TH = x_TH.contiguous()
        sum_TH = torch.empty_like(x_TH)
        for rows in self._pieces(len(x_TH)):
            zeros_TH, unread_TH = (held[: rows.stop - rows.start] for held in (self._zeros_TH, self._unread_TH))
            self._adder.add_norm_into(zeros_TH, x_TH[rows], self._ones_H, 1.0, sum_TH[rows], unread_TH)
        return sum_TH

    def gather(self, part_RV: Tensor, widths: Sequence[int]) -> Tensor:
        rows, start = len(part_RV), sum(widths[: self.rank])
        whole_RV = part_RV.new_zeros(rows, sum(widths))
        whole_RV[:, start : start + widths[self.rank]] = part_RV
        joined_RV = self._flat_total(whole_RV)
        return joined_RV if self.rank == 0 else part_RV[:, :0]

    def send(self, x: Tensor, to: int) -> None:
        self._only_other(to)
        self._flat_total(_bytes(x).to(self._zeros_TH.dtype))

    def receive(self, into: Tensor, sender: int) -> None:
        self._only_other(sender)
        found = self._flat_total(torch.zeros_like(_bytes(into), dtype=self._zeros_TH.dtype))
        into.copy_(found.to(torch.uint8).view(into.dtype).view(into.shape))

    def meet(self) -> None:
        self._hosts.meet()

    def abort(self, why: str) -> None:
        self._adder.abort()
        self._hosts.abort(why)

    def check(self) -> None:
        if failure := self._adder.failure:
            self.abort(f"rank {self.rank}: {failure}")
            self._hosts.check()
            raise RanksApart(failure)
        self._hosts.check()

    def _flat_total(self, x: Tensor) -> Tensor:
        """Of a tensor of any shape."""
        channels = self._adder.channels
        rows = -(-x.numel() // channels)
        x_TH = x.new_zeros(rows * channels)
        x_TH[: x.numel()] = x.flatten()
        return self.total(x_TH.view(rows, channels)).flatten()[: x.numel()].view(x.shape)

    def _pieces(self, rows: int) -> list[slice]:
        most = self._adder.rows
        return [slice(start, min(start + most, rows)) for start in range(0, rows, most)]

    def _only_other(self, rank: int) -> None:
        if rank != 1 - self.rank:
            raise ValueError(f"rank {self.rank} of two has no rank {rank} to talk to")


def _bytes(x: Tensor) -> Tensor:
    """uint8 [bytes]."""
    return x.contiguous().view(-1).view(torch.uint8)
