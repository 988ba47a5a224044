"""Ranks that are processes: whatever happens to one, all end, whoever waits is told, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest
from run_world import ask, tokens_of
from symbolic_ranks import SymbolicRecipe

from kakera.contract.events import Tokens
from kakera.errors import EngineDied, KakeraError
from kakera.run.process.client import EngineClient

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run a minute later: 3 seconds are promised on a machine that computes nothing else."""
    return psutil.wait_procs(processes, timeout=60)[1]


# Who, what happens to it, while a stream runs or not; and the exit code that the server sees of rank 0
FATES = {
    "rank 1 is killed": (1, signal.SIGKILL, True, 70),
    "rank 1 is killed while nothing runs": (1, signal.SIGKILL, False, 70),
    "rank 2 is stopped": (2, signal.SIGSTOP, True, 70),
    "rank 1 is stopped while nothing runs": (1, signal.SIGSTOP, False, 70),
    "rank 0 is killed": (0, signal.SIGKILL, True, -signal.SIGKILL),
    "rank 0 is stopped": (0, signal.SIGSTOP, True, -signal.SIGKILL),
}


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
def test_whatever_happens_to_one_rank_ends_all_and_every_client_is_told(fate):
    who, sent, busy, code = FATES[fate]

    async def life() -> None:
        client = await EngineClient.start(SymbolicRecipe(ranks=3 if who == 2 else 2))
        engine = psutil.Process(client.pid)
        ranks = [engine, *sorted(engine.children(), key=lambda process: process.pid)]
        try:
            streams = [client.stream(ask(f"r{i}", tokens_of(i, 100), 1500)) for i in range(2)]
            for stream in streams:
                while busy and not isinstance(await anext(stream), Tokens):
                    pass
            os.kill(ranks[who].pid, sent)
            for stream in streams if busy else []:
                with pytest.raises(EngineDied, match=f"exit code {code}"):
                    async with asyncio.timeout(60):
                        async for _ in stream:
                            pass
            assert await asyncio.wait_for(client.died(), 60) == code
            assert len(ranks) == (3 if who == 2 else 2) and not left(ranks)
        finally:
            await client.close()

    asyncio.run(life())


@pytest.mark.slow
def test_what_a_rank_can_not_do_is_said_in_its_words():
    """At the start, by the exit status that it would have alone, also where rank 0 is still at it."""
    for late in (0.0, 2.5):
        with pytest.raises(KakeraError, match="the file x is truncated") as refused:
            asyncio.run(EngineClient.start(SymbolicRecipe(refuses="the file x is truncated", late=late)))
        assert refused.value.exit_status == 1


@pytest.mark.slow
def test_a_rank_that_never_comes_ends_the_start(capfd):
    began = time.monotonic()
    with pytest.raises(KakeraError, match=r"rank 1 .* did nothing for 2 seconds while it was waited for: stopped"):
        asyncio.run(EngineClient.start(SymbolicRecipe(absent=True)))
    assert time.monotonic() - began < 60


def test_what_a_rank_raises_in_a_step_is_in_the_log_and_ends_all(capfd):
    async def life() -> None:
        client = await EngineClient.start(SymbolicRecipe(fails=5))
        try:
            ranks = [psutil.Process(client.pid), *psutil.Process(client.pid).children()]
            with pytest.raises(EngineDied, match="exit code 70"):
                async for _ in client.stream(ask("r", tokens_of(1, 100), 1500)):
                    pass
            assert await asyncio.wait_for(client.died(), 60) == 70 and not left(ranks)
        finally:
            await client.close()

    asyncio.run(life())
    assert "rank 1: MemoryError('no memory for a step')" in capfd.readouterr().err
