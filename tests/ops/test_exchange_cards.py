"""Two cards' exchange with a stand-in for its kernel: all that it makes of sums, with the reference's bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kakera.errors import RanksApart
from kakera.ops.exchange_cards import CardExchange
from kakera.ops.exchange_plain import ThreadExchange, Threads
from rank_threads import together

ROWS, CHANNELS = 4, 16
CPU = torch.device("cpu")


class StandIn:
    """What the kernel computes, by threads; and what it would do wrong with wrong arguments."""

    rows, channels = ROWS, CHANNELS

    def __init__(self, threads: ThreadExchange):
        self.threads = threads
        self.failure = ""

    def add_norm_into(self, x: Tensor, delta: Tensor, scale: Tensor, eps: float, sum_: Tensor, y: Tensor) -> None:
        assert x.shape == delta.shape == sum_.shape == y.shape and x.shape[1] == CHANNELS and 0 < len(x) <= ROWS
        assert all(each.is_contiguous() for each in (x, delta, scale, sum_, y)) and scale.dtype == torch.float32
        assert x.dtype == delta.dtype == sum_.dtype == y.dtype == torch.bfloat16
        sum_[:], y[:] = self.threads.add_norm(x, delta, scale, eps)

    def abort(self) -> None:
        self.failure = self.failure or "exchange 3 of row 0 was given up"


def exchange_of(threads: ThreadExchange) -> CardExchange:
    return CardExchange(StandIn(threads), threads.rank, threads, torch.bfloat16, CPU)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(1, 11), st.lists(st.integers(1, 40), min_size=2, max_size=2), st.integers(0, 99))
def test_it_gives_what_threads_give(rows, widths, seed):
    def drawn(rank: int, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * seed + rank)
        return torch.randn(rows, width, generator=generator).bfloat16()

    def program(exchange: ThreadExchange | CardExchange) -> list[Tensor]:
        own, part = drawn(exchange.rank, CHANNELS), drawn(exchange.rank, widths[exchange.rank])
        scale = torch.linspace(0.5, 2, CHANNELS)
        found = [*exchange.add_norm(drawn(7, CHANNELS), own, scale, 1e-6), exchange.total(own)]
        found.append(exchange.gather(part, widths))
        tokens = torch.tensor([-1, 2**62 + 5, 0, 248319, 255, 256])[: rows % 6 + 1]
        into = torch.zeros_like(tokens) if exchange.rank else tokens
        for sent in (into, part[:, :1].float() if exchange.rank == 0 else torch.zeros(rows, 1)):
            if exchange.rank == 0:
                exchange.send(sent, 1)
            else:
                exchange.receive(sent, 0)
            found.append(sent)
        exchange.meet()
        exchange.check()
        return found

    expected = together(2, program)
    for found, wanted in zip(together(2, lambda threads: program(exchange_of(threads))), expected, strict=True):
        assert all(
            torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(found, wanted, strict=True)
        )


def test_a_kernel_that_gave_up_ends_both_ranks_in_words():
    threads = Threads(2)
    exchange = exchange_of(threads.of(0))
    exchange.check()
    exchange._adder.failure = "exchange 7 of row 0 waited too long"  # type: ignore[misc]
    with pytest.raises(RanksApart, match="rank 0: exchange 7 of row 0 waited too long"):
        exchange.check()
    with pytest.raises(RanksApart, match="waited too long"):
        threads.of(1).meet()
    other = exchange_of(threads.of(1))
    other.abort("for another reason")
    assert "given up" in other._adder.failure


def test_two_ranks_have_nobody_else():
    exchange = exchange_of(Threads(2).of(0))
    for rank in (0, 2):
        with pytest.raises(ValueError, match=f"no rank {rank}"):
            exchange.send(torch.ones(1), rank)
