"""Ranks as threads: every rank has the reference's bits in any program of calls; nobody waits for ever."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kakera.errors import RanksApart
from kakera.ops.exchange import ALONE, exchange_norm_reference, total_reference
from kakera.ops.exchange_plain import ThreadExchange, Threads
from kakera.ops.fused import add_rms_norm
from rank_threads import together

WIDTH, EPS = 24, 1e-6
CALLS = st.lists(st.sampled_from(["add_norm", "total", "gather", "hop", "meet"]), min_size=1, max_size=12)


def part(seed: int, step: int, rank: int, rows: int, dtype: torch.dtype, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    return torch.randn(rows, width, generator=generator).to(dtype)


@pytest.mark.slow
@given(
    CALLS, st.integers(2, 4), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99)
)
def test_any_program_gives_every_rank_the_references_bits(calls, ranks, rows, dtype, seed):
    scale = torch.rand(WIDTH, generator=torch.Generator().manual_seed(seed))
    begin = part(seed, -1, 0, rows, dtype)
    widths = [3 + rank for rank in range(ranks)]

    def work(exchange: ThreadExchange) -> list[Tensor]:
        x, found = begin, []
        for step, call in enumerate(calls):
            own = part(seed, step, exchange.rank, rows, dtype)
            if call == "add_norm":
                x, y = exchange.add_norm(x, own, scale, EPS)
                found += [x, y]
            elif call == "total":
                found.append(exchange.total(own))
                own.fill_(7.0)  # what was given may change afterwards
            elif call == "gather":
                found.append(exchange.gather(own[:, : widths[exchange.rank]], widths))
            elif call == "hop" and exchange.rank == 0:
                for other in range(1, ranks):
                    exchange.send(own, other)
            elif call == "hop":
                exchange.receive(own, 0)
                found.append(own)
            else:
                exchange.meet()
        return found

    def expected(rank: int) -> list[Tensor]:
        x, found = begin, []
        for step, call in enumerate(calls):
            parts = [part(seed, step, each, rows, dtype) for each in range(ranks)]
            if call == "add_norm":
                x, y = exchange_norm_reference(x, parts, scale, EPS)
                found += [x, y]
            elif call == "total":
                found.append(total_reference(parts))
            elif call == "gather":
                cut = [each[:, :width] for each, width in zip(parts, widths, strict=True)]
                found.append(torch.cat(cut, dim=1) if rank == 0 else torch.empty(rows, 0, dtype=dtype))
            elif call == "hop" and rank:
                found.append(parts[0])
        return found

    for rank, found in enumerate(together(ranks, work)):
        wanted = expected(rank)
        assert len(found) == len(wanted)
        assert all(torch.equal(one, other) and one.dtype == dtype for one, other in zip(found, wanted, strict=True))


def test_a_sum_is_rounded_once_and_in_the_order_of_ranks():
    """In bfloat16 1 + 2^-8 + 2^-8 is 1 in steps, and 1 + 2^-7 rounded once."""
    parts = [torch.tensor([value]).bfloat16() for value in (1.0, 2**-8, 2**-8)]
    assert total_reference(parts).item() == 1 + 2**-7
    assert (parts[0] + parts[1] + parts[2]).item() == 1.0


def test_alone_costs_nothing_and_has_the_bits_of_no_exchange():
    x, delta, scale = part(1, 0, 0, 5, torch.bfloat16), part(1, 1, 0, 5, torch.bfloat16), torch.rand(WIDTH)
    for one, other in zip(ALONE.add_norm(x, delta, scale, EPS), add_rms_norm(x, delta, scale, EPS), strict=True):
        assert torch.equal(one, other)
    assert ALONE.total(x) is x and ALONE.gather(x, [WIDTH]) is x
    ALONE.meet()
    ALONE.check()
    with pytest.raises(ValueError, match="alone"):
        ALONE.send(x, 1)
    with pytest.raises(ValueError, match="alone"):
        ALONE.receive(x, 1)


WAITS = {
    "add_norm": lambda e: e.add_norm(torch.ones(1, 4), torch.ones(1, 4), torch.ones(4), EPS),
    "total": lambda e: e.total(torch.ones(2)),
    "gather": lambda e: e.gather(torch.ones(1, 2), [2, 2]),
    "receive": lambda e: e.receive(torch.ones(2), 1 - e.rank),
    "meet": lambda e: e.meet(),
}


@pytest.mark.parametrize("call", WAITS)
def test_a_rank_whose_peer_does_not_come_leaves_and_says_who(call):
    exchange = Threads(2, patience=0.1).of(0)
    with pytest.raises(RanksApart, match=r"rank 1 (did not come|sent nothing)"):
        WAITS[call](exchange)
    with pytest.raises(RanksApart, match="rank 1"):  # for good
        exchange.check()


@pytest.mark.parametrize("call", WAITS)
def test_giving_up_wakes_whoever_waits_and_the_first_reason_stays(call):
    threads = Threads(2)
    timer = threading.Timer(0.05, threads.of(1).abort, ["the operator wanted it"])
    timer.start()
    with pytest.raises(RanksApart, match="the operator wanted it"):
        WAITS[call](threads.of(0))
    threads.of(0).abort("another reason")
    with pytest.raises(RanksApart, match="the operator wanted it"):
        WAITS[call](threads.of(1))


@pytest.mark.parametrize(
    "ways",
    [
        (WAITS["total"], WAITS["meet"]),
        (lambda e: e.total(torch.ones(2)), lambda e: e.total(torch.ones(3))),
        (lambda e: e.total(torch.ones(2)), lambda e: e.total(torch.ones(2).bfloat16())),
        (WAITS["add_norm"], lambda e: e.total(torch.ones(1, 4))),
        (lambda e: e.gather(torch.ones(1, 2), [2, 2]), lambda e: e.gather(torch.ones(3, 2), [2, 2])),
        (lambda e: e.send(torch.ones(2), 1), lambda e: e.receive(torch.ones(3), 0)),
        (lambda e: e.send(torch.ones(2).long(), 1), lambda e: e.receive(torch.ones(2), 0)),
    ],
)
def test_ranks_that_take_different_ways_are_found_out(ways):
    with pytest.raises(RanksApart, match=r"ranks are apart|wants"):
        together(2, lambda exchange: ways[exchange.rank](exchange))


def test_columns_that_are_not_a_ranks_own_are_refused():
    with pytest.raises(ValueError, match="rank 1 brings 2 of the columns"):
        together(2, lambda exchange: exchange.gather(torch.ones(1, 2), [2, 3]))
