"""Whether the engine makes progress: work in the queue and no step finished for a while is an outage, whatever else
looks well."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from kakera.contract.events import EngineStats, Finished
from kakera.contract.request import Request, Sampling
from kakera.errors import EngineDied, RequestRefused
from kakera.run.interface import PROBE, AsyncEngine

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
STALL_SECONDS = 60.0  # the longest sound step is one prefill chunk on a slow CPU, some seconds


class EngineWatch:
    """Polls the engine, knows since when nothing moved, and calls `on_death` once when the engine is gone."""

    def __init__(
        self,
        engine: AsyncEngine,
        on_death: Callable[[EngineDied], None] | None = None,
        stall_seconds: float = STALL_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ):
        self.engine = engine
        self.on_death = on_death
        self.stall_seconds = stall_seconds
        self.death: EngineDied | None = None
        self._poll_seconds = poll_seconds
        self._steps = -1
        self.moved_at = time.monotonic()  # when the engine last finished a step, or said that nothing is to be computed
        self.last = EngineStats()

    async def run(self) -> None:
        while self.death is None:
            with contextlib.suppress(EngineDied):
                await self.look()
            await asyncio.sleep(self._poll_seconds)

    async def look(self) -> EngineStats:
        """The engine's figures now. Raises EngineDied."""
        try:
            stats = await self.engine.stats()
        except EngineDied as error:
            self.give_up(error)
            raise
        # an old report shows nothing: an engine that hangs in its first step after a pause was idle in its last one
        if stats.at != self.last.at and (stats.steps != self._steps or stats.idle):
            self._steps, self.moved_at = stats.steps, time.monotonic()
        self.last = stats
        return stats

    def give_up(self, error: EngineDied) -> None:
        """The engine is gone, or hangs for good."""
        if self.death is None:
            self.death = error
            log.error("%s", error)
            if self.on_death:
                self.on_death(error)

    @property
    def stalled_for(self) -> float:
        """Seconds since the engine was last idle or finished a step."""
        return time.monotonic() - self.moved_at

    async def problem(self) -> str | None:
        """What is wrong, in words, or None."""
        try:
            await self.look()
        except EngineDied as error:
            return str(error)
        return self.stall_text() if self.stalled_for > self.stall_seconds else None

    def stall_text(self) -> str:
        return (
            f"the engine hangs: no step finished for {self.stalled_for:.0f} seconds (limit {self.stall_seconds:.0f}); "
            f"its last report had {self.last.running} running and {self.last.waiting} waiting requests"
        )


async def one_token(engine: AsyncEngine, seconds: float) -> str | None:
    """Have the engine generate a token as for any client. Returns what is wrong, in words, or None."""
    request = Request(f"{PROBE}{time.monotonic_ns()}", (0,), Sampling(max_tokens=1, seed=0, temperature=0.0))
    try:
        async with (
            asyncio.timeout(seconds),
            contextlib.aclosing(engine.stream(request)) as events,  # type: ignore[type-var]
        ):
            async for event in events:
                if isinstance(event, Finished):
                    return event.message if event.reason == "error" else None
    except TimeoutError:
        return f"no token within {seconds:.0f} seconds"
    except EngineDied as error:
        return str(error)
    except RequestRefused as error:
        return None if error.status == 429 else str(error)  # a full queue that moves is healthy
    return "the engine ended the request without a result"
