"""Ranks of one model in this process: a thread each, and whatever one of them raises."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kakera.errors import RanksApart
from kakera.ops.exchange_plain import ThreadExchange, Threads

T = TypeVar("T")


def together(ranks: int, work: Callable[[ThreadExchange], T], patience: float = 60.0) -> list[T]:
    """`work` of every rank at the same time; its results by rank. What one raises on its own account comes first, then
    what the others say of it."""
    threads = Threads(ranks, patience)

    def of(rank: int) -> T:
        try:
            return work(threads.of(rank))
        except BaseException as error:
            threads.give_up(f"rank {rank} failed: {error}")
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(of, rank) for rank in range(ranks)]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, RanksApart)), errors[0])
    return [future.result() for future in futures]
