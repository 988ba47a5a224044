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
from kakera.server.app import create_app
from kakera.server.http.access import OPEN, Access
from kakera.server.http.connection import CONNECTIONS, KEEP_ALIVE_SECONDS, allow_open_files
from kakera.server.model import ServedModel
from kakera.server.watch import STALL_SECONDS, EngineWatch

log = logging.getLogger(__name__)
FINISH_SECONDS = 3  # for running requests to end by themselves when the server is told to stop
LAST_WORDS_SECONDS = 2  # for the others to receive their error before sockets close

Attendant = Callable[[EngineWatch], Awaitable[None]]


class Server(uvicorn.Server):
    """Ends what does not finish in time, or when a second signal comes, with an error, where uvicorn would cut it off.

    `attend` runs from the moment that the server listens until it stops.
    """

    def __init__(self, config: uvicorn.Config, end_requests: Callable[[], None], attend: Callable[[], Awaitable[None]]):
        super().__init__(config)
        self._end_requests = end_requests
        self._attend = attend
        self._attending: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # while it listens and has not been hurried

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._loop = asyncio.get_running_loop()
            self._attending = asyncio.ensure_future(self._attend())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and self._loop:
            self._loop.call_soon_threadsafe(self._end_requests)
            self._loop = None  # the third signal is uvicorn's: it cuts
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(FINISH_SECONDS, self._end_requests)
        await super().shutdown(sockets)
        timer.cancel()
        if self._attending:
            self._attending.cancel()


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
    keep_alive_seconds: int = KEEP_ALIVE_SECONDS,
    attend: Attendant = unattended,
    plan: Plan | None = None,
) -> int:
    """Returns the exit status: 0 after SIGINT or SIGTERM, 70 if the engine died or was given up.

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
    app = create_app(engine, model, plan=plan, watch=watch, access=access)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,  # `configure_logging` gives its lines our form
        access_log=False,  # kakera.requests has one line per request already
        timeout_graceful_shutdown=FINISH_SECONDS + LAST_WORDS_SECONDS,
        **(CONNECTIONS | {"timeout_keep_alive": keep_alive_seconds}),
    )
    server = Server(config, app.state.service.stop, watch_over)
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
