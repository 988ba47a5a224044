"""Idle sweeps: after every busy time, never beside a request, and a suspicion is said once and taken back."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kakera.contract.events import LATE_STEPS, EngineStats, RegionRead
from kakera.server.operate.spill import SpillWatch

PIECE, COUNT = 64 * 2**20, 100
FAST, SLOW = 0.0001, 0.003


class Engine:
    """`slow`: reads of both rounds, in their order, that are slow."""

    def __init__(self, slow: set[int]) -> None:
        self.slow = slow
        self.sweeps = 0

    async def sweep(self) -> list[RegionRead]:
        self.sweeps += 1
        times = [SLOW if i in self.slow else FAST for i in range(2 * COUNT)]
        return [RegionRead("weights", PIECE * i, PIECE, (times[i], times[COUNT + i])) for i in range(COUNT)]


def reads(*pieces: int) -> set[int]:
    return {place for i in pieces for place in (i, COUNT + i)}


def test_idle_sweeps_find_a_spill_and_its_end(caplog) -> None:
    caplog.set_level(logging.WARNING)
    engine = Engine(set())
    spill = SpillWatch(engine)  # type: ignore[arg-type]

    def at(now: float, steps: int, running: int = 0) -> tuple[int, int]:
        asyncio.run(spill.look(EngineStats(steps=steps, running=running), now))
        return engine.sweeps, len(spill.warnings)

    assert at(0, 1) == (0, 0)  # idle since now
    assert at(6, 1) == (1, 0)
    assert at(100, 1) == (1, 0)  # it has computed nothing since
    assert at(101, 9, running=1) == (1, 0)
    engine.slow = reads(4, 5, 6)
    assert at(150, 20) == (1, 0) and at(152, 20) == (1, 0)
    assert at(156, 20) == (2, 1)
    assert "201 MB of weights (from 268 MB on)" in spill.warnings[0]
    assert at(170, 30) == (2, 1)  # too soon
    assert at(220, 30) == (3, 1)
    engine.slow = set()
    assert at(290, 40) == (4, 0)
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and said[0].startswith("spill suspected") and said[1].startswith("all of")


def test_steps_that_are_late_bring_a_sweep_beside_requests_but_seldom():
    engine, told = Engine(reads(4, 5)), []
    spill = SpillWatch(engine, told.append)  # type: ignore[arg-type]

    def at(now: float, late: int, running: int = 1) -> int:
        stats = EngineStats(steps=int(now), running=running, counters={LATE_STEPS: late})
        asyncio.run(spill.look(stats, now))
        return engine.sweeps

    assert at(0, 0) == at(10, 0) == 0
    assert at(11, 1) == 1 and told == [{"weights": 2 * PIECE}]
    assert at(12, 2) == at(70, 9) == 1, "once a minute"
    assert at(71, 9) == 2 and at(200, 9) == 2, "not for what was late before the last one"
    engine.slow = set()
    assert at(300, 10) == 3 and told[-1] == {} and spill.found == ()
    assert at(302, 10, running=0) == 3 and at(310, 10, running=0) == 3
    assert at(361, 10, running=0) == 4, "and the sweep while idle, as before"


@pytest.mark.parametrize("until", [0, 1, 50, 99, 100, 101, 120, 199, 200])
def test_clocks_that_come_back_are_no_spill(until) -> None:
    """Of a card that was idle the first reads are slow, however many."""
    spill = SpillWatch(Engine(set(range(until))))  # type: ignore[arg-type]
    for now in (0, 6):
        asyncio.run(spill.look(EngineStats(steps=1), now))
    assert spill.found == ()
