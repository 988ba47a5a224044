"""What a rank with a card does around its kernels: copies until all are warm, and a self-test that finds wrong sums."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from symbolic_ranks import meetings

from kakera.errors import KakeraError
from kakera.ops import exchange_host
from kakera.ops.exchange import ALONE
from kakera.ops.exchange_plain import ThreadExchange
from kakera.run.ranks import cards
from kakera.run.ranks.cards import ROWS, TESTED, SettlingExchange, segment_bytes, self_test
from kakera.run.ranks.memory import shared_memory
from rank_threads import together

CPU = torch.device("cpu")


class Named:
    """Says who was asked."""

    rank, ranks = 0, 2

    def __init__(self, name: str):
        self._name = name

    def total(self, x: str) -> str:
        return self._name

    def meet(self) -> None: ...


def test_nothing_waits_on_a_card_before_all_ranks_have_met_but_in_graphs():
    capturing = False
    exchange = SettlingExchange(Named("copies"), Named("kernels"), lambda: capturing)  # type: ignore[arg-type]
    assert exchange.total("x") == "copies"
    capturing = True
    assert exchange.total("x") == "kernels"
    capturing = False
    assert exchange.total("x") == "copies"
    exchange.meet()
    assert exchange.total("x") == "kernels"
    assert ALONE.capturable and exchange.capturable and not ThreadExchange.capturable


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", [0, 1, 5])
def test_the_self_test_counts_wrong_sums(dtype, wrong):
    def work(exchange: ThreadExchange) -> None:
        total, asked = exchange.total, 0

        def spoilt(x: torch.Tensor) -> torch.Tensor:
            nonlocal asked
            asked += 1
            found = total(x)
            if asked <= wrong:
                found[-1, 3] += 1
            return found

        exchange.total = spoilt  # type: ignore[method-assign]
        self_test(exchange, 40, dtype, CPU)
        assert asked == TESTED

    if wrong == 0:
        together(2, work)
    else:
        with pytest.raises(KakeraError, match=f"{wrong} of {TESTED} sums of two cards"):
            together(2, work)


def test_a_card_that_the_other_never_reaches_is_said_in_words():
    def work(exchange: ThreadExchange) -> None:
        if exchange.rank == 0:
            exchange.total = lambda x: x  # type: ignore[method-assign]
            exchange.abort("rank 1 did not come")
            self_test(exchange, 40, torch.bfloat16, CPU)

    with pytest.raises(KakeraError, match=r"do not reach each other .*rank 1 did not come"):
        together(2, work)


def test_a_driver_that_does_not_let_the_card_see_the_memory_refuses_the_start(monkeypatch):
    """Under WSL2, or in a container: said by whichever rank it is, in the words of the driver."""

    def refuse(*_: object, **options: object) -> None:
        raise KakeraError("the driver does not let the card see 0.00 GB of host memory: OPERATING_SYSTEM")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cards, "Segment", refuse)
    one, _ = meetings(2)
    one.segment = 0
    with pytest.raises(KakeraError, match="does not let the card see"):
        cards.card_exchange(one, 5120, torch.bfloat16)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_both_ranks_map_the_memory_that_has_no_name(monkeypatch):
    monkeypatch.setattr(exchange_host.mapped, "register", lambda address, size: address)
    descriptor, layout = shared_memory(segment_bytes(64)), exchange_host.Layout(ROWS, 64)
    path = Path(f"/proc/self/fd/{descriptor}")
    one, other = (exchange_host.Segment(path, layout.total, create=False) for _ in range(2))
    os.close(descriptor)
    assert one.address != other.address and other.word(exchange_host.ABORT) == 0
    one.set_word(exchange_host.ABORT, 1)
    assert other.word(exchange_host.ABORT) == 1


def test_the_memory_that_cards_share_is_a_few_megabytes():
    assert segment_bytes(5120) < 4 * 2**20 and ROWS == 64
