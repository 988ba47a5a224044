"""Whether the card's memory is still on the card: timed reads after every busy time, while nobody waits, and when steps
are late."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kakera.contract.events import LATE_STEPS, EngineStats
from kakera.errors import EngineDied
from kakera.run.interface import AsyncEngine
from kakera.run.spilled import Spilled, spilled
from kakera.server.watch import EngineWatch

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
IDLE_SECONDS = 5.0  # a sweep takes some 80 ms, which a request that comes just then waits
PAUSE_SECONDS = 60.0  # between sweeps


class SpillWatch:
    """`found`: regions of which a part seems to lie on the host, by the last sweep.

    A card that has been idle may read all of its memory slowly until its clocks have come back, at any place of a
    sweep. So a sweep is its own measure, and a piece has to be slow in both of its reads: if all of the first round is
    slow, more than half of the reads are before any piece is slow twice, and the median with them.
    """

    def __init__(self, engine: AsyncEngine, told: Callable[[Mapping[str, int]], None] = lambda found: None):
        """`told` gets the bytes of each region that seem to lie on the host, after every sweep."""
        self.found: tuple[Spilled, ...] = ()
        self._engine = engine
        self._told = told
        self._late = 0.0  # times that steps had been late, at the last sweep
        self._swept_steps = -1  # of the engine at the last sweep
        self._swept_at = float("-inf")
        self._idle_since: float | None = None

    @property
    def warnings(self) -> list[str]:
        return [f"spill suspected: {region.text}; close other programs that use the card" for region in self.found]

    async def run(self, watch: EngineWatch) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.look(watch.last, time.monotonic())
            except EngineDied:
                return

    async def look(self, stats: EngineStats, now: float) -> None:
        """Sweep if the engine has been idle for a while and has worked since the last time, or if it works and steps
        have been late since then. Raises EngineDied."""
        late = stats.counters.get(LATE_STEPS, 0.0)
        if not stats.idle:
            self._idle_since = None
            due = late > self._late
        else:
            self._idle_since = now if self._idle_since is None else self._idle_since
            due = now - self._idle_since >= IDLE_SECONDS and stats.steps != self._swept_steps
        if not due or now - self._swept_at < PAUSE_SECONDS:
            return
        self._swept_at, self._swept_steps, self._late = now, stats.steps, late
        before, self.found = self.found, spilled([await self._engine.sweep()])
        self._told({region.region: region.bytes for region in self.found})
        if {region.region for region in before} != {region.region for region in self.found}:
            for line in self.warnings or ["all of the card's memory is read at its usual speed again"]:
                log.warning("%s", line)
