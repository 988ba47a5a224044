"""Exchanges of ranks on a CPU: the plain form of every operation, and the ranks of one process, a thread each.

How tensors get to the others is one method (`PlainExchange.everyones`), so that processes need no sums of their own.
Ranks of threads are the reference of the kernels, and what tests of a shared model run on: its thirty exchanges a pass
cost milliseconds there.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from kakera.errors import RanksApart
from kakera.ops.exchange import exchange_norm_reference, total_reference

PATIENCE = 60.0  # seconds that a rank waits for another: a CPU's step may take as long as it likes, a hung one not
POLL = 0.05  # seconds between looks at whether somebody has given up, while nothing comes
SLOTS = 2  # of what a rank shows: see `Threads`


class PlainExchange(ABC):
    """An `Exchange` in torch's operations. What a rank asks for goes along as a `note`, so that ranks which took
    different ways are found out at once instead of adding what does not belong together."""

    capturable = False

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks

    @abstractmethod
    def everyones(self, note: str, x: Tensor) -> Sequence[Tensor]:
        """The x of all ranks, in their order; of a tensor that is to change afterwards its value now. Raises RanksApart
        if one of them does not come, has given up, or has another note."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None: ...

    @abstractmethod
    def receive(self, into: Tensor, sender: int) -> None: ...

    @abstractmethod
    def abort(self, why: str) -> None: ...

    @abstractmethod
    def check(self) -> None: ...

    def add_norm(self, x_TH: Tensor, delta_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return exchange_norm_reference(x_TH, self.everyones(note_of("add_norm", delta_TH), delta_TH), scale_H, eps)

    def total(self, x_TH: Tensor) -> Tensor:
        return total_reference(self.everyones(note_of("total", x_TH), x_TH))

    def gather(self, part_RV: Tensor, widths: Sequence[int]) -> Tensor:
        if part_RV.shape[-1] != widths[self.rank]:
            raise ValueError(f"rank {self.rank} brings {part_RV.shape[-1]} of the columns {list(widths)}")
        found = self.everyones(f"gather of {part_RV.shape[0]} rows", part_RV)
        return torch.cat(list(found), dim=-1) if self.rank == 0 else part_RV[..., :0]

    def meet(self) -> None:
        self.everyones("meet", _NOTHING)


_NOTHING = torch.empty(0)


def note_of(what: str, x: Tensor) -> str:
    return f"{what} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


class Threads:
    """Where the ranks of one process meet; `of` gives each its side.

    A rank shows its n-th tensor in slot n % 2, waits until all have shown theirs, and reads. Two slots are enough: it
    shows n + 2 only after all have shown n + 1, which each does after it has read n.
    """

    def __init__(self, ranks: int, patience: float = PATIENCE):
        self.ranks, self.patience = ranks, patience
        self.changed = threading.Condition()
        self.given_up = ""
        self.counts = [0] * ranks  # exchanges that each rank has come to
        self.shown: list[list[tuple[str, Tensor]]] = [[("", _NOTHING)] * ranks for _ in range(SLOTS)]
        self.sent = {(one, other): SimpleQueue[Tensor]() for one in range(ranks) for other in range(ranks)}

    def of(self, rank: int) -> ThreadExchange:
        return ThreadExchange(self, rank)

    def give_up(self, why: str) -> None:
        """The first reason stays: the others follow from it."""
        with self.changed:
            self.given_up = self.given_up or why
            self.changed.notify_all()

    def late(self, count: int) -> list[int]:
        """The ranks that have not come to that many exchanges."""
        return [rank for rank, come in enumerate(self.counts) if come < count]


class ThreadExchange(PlainExchange):
    """The side of one rank, which is one thread."""

    def __init__(self, threads: Threads, rank: int):
        super().__init__(rank, threads.ranks)
        self._threads = threads

    def everyones(self, note: str, x: Tensor) -> Sequence[Tensor]:
        threads = self._threads
        with threads.changed:
            self.check()
            count = threads.counts[self.rank] + 1
            slot = threads.shown[count % SLOTS]
            slot[self.rank] = note, x.detach().clone()
            threads.counts[self.rank] = count
            threads.changed.notify_all()
            threads.changed.wait_for(lambda: threads.given_up or not threads.late(count), threads.patience)
            if not threads.given_up and (late := threads.late(count)):
                threads.give_up(f"rank {late[0]} did not come to exchange {count}, a {note}, of rank {self.rank}")
            self.check()
            notes = [shown for shown, _ in slot]
            if len(set(notes)) > 1:
                threads.give_up(f"ranks are apart in exchange {count}: {'; '.join(notes)}")
            self.check()
            return [tensor for _, tensor in slot]

    def send(self, x: Tensor, to: int) -> None:
        self.check()
        self._threads.sent[self.rank, to].put(x.detach().clone())

    def receive(self, into: Tensor, sender: int) -> None:
        queue, left = self._threads.sent[sender, self.rank], self._threads.patience
        while True:
            self.check()
            try:
                found = queue.get(timeout=min(left, POLL))
                break
            except Empty:
                left -= POLL
                if left <= 0:
                    self.abort(f"rank {sender} sent nothing to rank {self.rank}")
        if found.shape != into.shape or found.dtype != into.dtype:
            self.abort(
                f"rank {sender} sent {note_of('a tensor', found)}, rank {self.rank} wants {note_of('one', into)}"
            )
            self.check()
        into.copy_(found)

    def abort(self, why: str) -> None:
        self._threads.give_up(why)

    def check(self) -> None:
        if self._threads.given_up:
            raise RanksApart(self._threads.given_up)
