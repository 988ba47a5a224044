"""The watchdog beside the server: says that it is ready, feeds the supervisor by progress, ends a server that hangs."""

from __future__ import annotations

import asyncio

from kakera.errors import EngineDied
from kakera.run.interface import AsyncEngine
from kakera.server.run import Attendant
from kakera.server.watch import EngineWatch, one_token
from kakera.service.notify import Notifier
from kakera.target.target import CUDA

TICK_SECONDS = 0.5


async def first_token(engine: AsyncEngine, seconds: float = CUDA.patience.first_token_seconds) -> None:
    """Generate a token before anybody is told that the server is ready. Raises EngineDied saying why none came."""
    if problem := await one_token(engine, seconds):
        raise EngineDied(f"the engine is loaded but generates nothing: {problem}")


def attendant(notifier: Notifier, status: str) -> Attendant:
    """Attends a server that listens and whose engine has generated a token. `status`: a line for `systemctl status`.

    WATCHDOG=1 goes out when the engine has moved since the last one, at most twice a second. The time without progress
    is counted in ticks, not by the clock: a machine that was asleep, or a server that was stopped, blames nobody.
    Raises EngineDied when the engine has not moved for `watch.stall_seconds`.
    """

    async def attend(watch: EngineWatch) -> None:
        notifier.send("READY=1", f"STATUS={status}")
        fed, silent = watch.moved_at, 0.0
        while silent <= watch.stall_seconds:
            await asyncio.sleep(TICK_SECONDS)
            if watch.moved_at == fed:
                silent += TICK_SECONDS
                continue
            fed, silent = watch.moved_at, 0.0
            load = f"{watch.last.running} running, {watch.last.waiting} waiting"
            notifier.send("WATCHDOG=1", f"STATUS={status}; {load}")
        notifier.send(f"STATUS={watch.stall_text()}")
        raise EngineDied(watch.stall_text())

    return attend
