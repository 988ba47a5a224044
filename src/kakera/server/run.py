"""Serve until told to stop, or until the engine dies or hangs: then answer who waits, and exit with its status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from socket import socket
from types import FrameType

import uvicorn

from kakera.errors import EngineDied
from kakera.plan.plan import Plan
from kakera.run.interface import AsyncEngine
from kakera.run.process.engine_process import settle, show_crashes
from kakera.run.process.kv_events import KvEvents
from kakera.server.app import create_app
from kakera.server.http.access import OPEN, Access
from kakera.server.http.connection import CONNECTIONS, KEEP_ALIVE_SECONDS, allow_open_files
from kakera.server.http.drain import Drain
from kakera.server.http.sleep import IdleSleep
from kakera.server.model import ServedModel
from kakera.server.watch import STALL_SECONDS, EngineWatch

log = logging.getLogger(__name__)
DRAIN_SECONDS = 3.0  # for running requests to end by themselves when the server is told to stop
LAST_WORDS_SECONDS = 2  # for the others to receive their error before sockets close

Attendant = Callable[[EngineWatch], Awaitable[None]]


class Server(uvicorn.Server):
    """Listens until its drain is over: a signal begins it, a second one ends what still runs with an error, where
    uvicorn would close the port at once and cut off what runs.

    `attend` runs from the moment that the server listens until it stops.
    """

    def __init__(
        self, config: uvicorn.Config, drain: Drain, drain_seconds: float, attend: Callable[[], Awaitable[None]]
    ):
        super().__init__(config)
        self._drain, self._drain_seconds = drain, drain_seconds
        self._attend = attend
        self._tasks: list[asyncio.Future[None]] = []  # while it listens
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._loop = asyncio.get_running_loop()
            self._tasks = [asyncio.ensure_future(work) for work in (self._attend(), self._stop_when_drained())]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._loop is None or self._signals > 2:  # uvicorn cuts
            super().handle_exit(sig, frame)
        else:
            self._loop.call_soon_threadsafe(self._drain.give_up if self._signals == 2 else self._begin_to_drain)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()

    def _begin_to_drain(self) -> None:
        """Unless POST /drain has done so: whoever did said how long, and a supervisor sends SIGTERM after it."""
        if not self._drain.began:
            self._drain.begin(self._drain_seconds)

    async def _stop_when_drained(self) -> None:
        await self._drain.over.wait()
        self.should_exit = True


async def unattended(watch: EngineWatch) -> None:
    """Nobody ends a server whose engine hangs; /health says it."""


async def serve(
    engine: AsyncEngine,
    model: ServedModel,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    access: Access = OPEN,
    log_level: str = "info",
    stall_seconds: float = STALL_SECONDS,
    drain_seconds: float = DRAIN_SECONDS,
    keep_alive_seconds: int = KEEP_ALIVE_SECONDS,
    attend: Attendant = unattended,
    plan: Plan | None = None,
    idle_sleep: IdleSleep | None = None,
    kv_events: KvEvents | None = None,
) -> int:
    """Returns the exit status: 0 after a drain, which SIGINT, SIGTERM and POST /drain begin, 70 if the engine died or
    was given up.

    `stall_seconds` without progress are an outage. `attend` runs while the server listens; the EngineDied that it
    raises ends the server as a death of the engine does.
    """
    show_crashes()
    configure_logging(log_level)
    allow_open_files()

    def stop(error: EngineDied) -> None:
        app.state.service.stop(error)
        server.should_exit = True

    async def watch_over() -> None:
        try:
            await attend(watch)
        except EngineDied as error:
            watch.give_up(error)

    watch = EngineWatch(engine, on_death=stop, stall_seconds=stall_seconds)
    app = create_app(engine, model, plan=plan, watch=watch, access=access, idle_sleep=idle_sleep, kv_events=kv_events)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,  # `configure_logging` gives its lines our form
        access_log=False,  # kakera.requests has one line per request already
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        **(CONNECTIONS | {"timeout_keep_alive": keep_alive_seconds}),
    )
    server = Server(config, app.state.service.drain, drain_seconds, watch_over)
    settle()
    await asyncio.sleep(0)  # a Ctrl-C that came by now ends here, in silence; in its start uvicorn would show where
    await server.serve()
    if watch.death is not None:
        log.error("stopped with exit status %d: %s", watch.death.exit_status, watch.death)
        return watch.death.exit_status
    return 0


def configure_logging(level: str) -> None:
    """Every line on stderr, with time and level. What uvicorn says of its starts and stops, kakera says better."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name, least in (("kakera", level), ("uvicorn", level if level in ("debug", "error") else "warning")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least.upper())
