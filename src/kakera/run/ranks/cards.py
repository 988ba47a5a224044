"""RankExchange of a card: by copies through the host while a rank is built, by kernels from the first meeting on.

A kernel that waits for the other card has a limit of 0.8 s, since Windows resets a card at 2. Building takes what it
likes: one rank compiles while the other has its kernels on disk. So nothing waits on a card until all ranks are warm,
but in graphs, which are captured then and run later, and in the self-test, to which both come with the kernel loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kakera.errors import KakeraError, RanksApart
from kakera.ops.exchange import Exchange
from kakera.ops.exchange_cards import RANKS, CardExchange
from kakera.ops.exchange_host import HostExchange, Layout, Segment
from kakera.run.ranks.exchange import ProcessExchange
from kakera.run.ranks.meeting import Meeting

ROWS = 64  # of a launch, whose blocks have to be on the card all at once
TESTED = 64  # sums of the self-test


class SettlingExchange:
    """Implements Exchange: `plain` until the first meeting, which comes when all ranks are warm, then `cards`; while a
    graph is captured always `cards`."""

    capturable = True

    def __init__(
        self,
        plain: Exchange,
        cards: Exchange,
        captures: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ):
        self.rank, self.ranks = plain.rank, plain.ranks
        self._plain, self._cards, self._captures = plain, cards, captures
        self._settled = False

    @property
    def _now(self) -> Exchange:
        return self._cards if self._settled or self._captures() else self._plain

    def add_norm(self, x_TH: Tensor, delta_TH: Tensor, scale_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._now.add_norm(x_TH, delta_TH, scale_H, eps)

    def total(self, x_TH: Tensor) -> Tensor:
        return self._now.total(x_TH)

    def gather(self, part_RV: Tensor, widths: Sequence[int]) -> Tensor:
        return self._now.gather(part_RV, widths)

    def send(self, x: Tensor, to: int) -> None:
        self._now.send(x, to)

    def receive(self, into: Tensor, sender: int) -> None:
        self._now.receive(into, sender)

    def meet(self) -> None:
        self._cards.meet()
        self._settled = True

    def abort(self, why: str) -> None:
        self._cards.abort(why)

    def check(self) -> None:
        self._cards.check()


def segment_bytes(channels: int) -> int:
    """Of the memory that both cards see."""
    return Layout(ROWS, channels).total


def card_exchange(meeting: Meeting, channels: int, dtype: torch.dtype) -> Exchange:
    """Of a rank whose card is the current one, proven by sums of known numbers; all ranks call this at the same time.
    Raises KakeraError if the driver does not let the card see the memory, or what it sees is wrong."""
    plain = ProcessExchange(meeting)
    if meeting.ranks != RANKS:
        return plain
    assert meeting.segment is not None
    device = torch.device("cuda", torch.cuda.current_device())
    layout = Layout(ROWS, channels)
    segment = Segment(Path(f"/proc/self/fd/{meeting.segment}"), layout.total, create=False)
    adder = HostExchange(segment, layout, meeting.rank, device)
    adder.load(dtype)
    cards = CardExchange(adder, meeting.rank, meeting, dtype, device)
    meeting.everyones("self-test", memoryview(b""))
    self_test(cards, channels, dtype, device)
    return SettlingExchange(plain, cards)


def self_test(exchange: Exchange, channels: int, dtype: torch.dtype, device: torch.device) -> None:
    """Sums of whole numbers that differ by rank, round and place, and are exact in 16 bit. Raises KakeraError."""
    places_H = torch.arange(channels, device=device) % 31
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for i in range(TESTED):
        parts = [(places_H * (rank + 1) + i).to(dtype).expand(1 + i % ROWS, -1) for rank in range(exchange.ranks)]
        wrong += (exchange.total(parts[exchange.rank]) != parts[0] + parts[1]).any()
    found = int(wrong)  # waits for the card
    try:
        exchange.check()
    except RanksApart as error:
        raise KakeraError(
            f"the cards do not reach each other through host memory ({error}); serve on one of them: name one in --gpus"
        ) from None
    if found:
        raise KakeraError(
            f"{found} of {TESTED} sums of two cards through host memory were wrong; serve on one: name it in --gpus"
        )
