"""Serve until told to stop, or until the engine dies: then answer who waits, and exit with its status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from socket import socket

import uvicorn

from kakera.errors import EngineDied
from kakera.run.interface import AsyncEngine
from kakera.server.app import create_app
from kakera.server.health import EngineWatch
from kakera.server.model import ServedModel

log = logging.getLogger(__name__)
FINISH_SECONDS = 3  # for running requests to end by themselves when the server is told to stop
LAST_WORDS_SECONDS = 2  # for the others to receive their error before sockets close


class Server(uvicorn.Server):
    """Ends what does not finish in time with an error, where uvicorn would cut it off."""

    def __init__(self, config: uvicorn.Config, end_requests: Callable[[], None]):
        super().__init__(config)
        self._end_requests = end_requests

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(FINISH_SECONDS, self._end_requests)
        await super().shutdown(sockets)
        timer.cancel()


async def serve(
    engine: AsyncEngine,
    model: ServedModel,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    api_key: str | None = None,
    log_level: str = "info",
) -> int:
    """Returns the exit status: 0 after SIGINT or SIGTERM, 70 if the engine died."""

    configure_logging(log_level)

    def stop(error: EngineDied) -> None:
        server.should_exit = True

    watch = EngineWatch(engine, on_death=stop)
    app = create_app(engine, model, watch=watch, api_key=api_key)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,  # kakera.requests has one line per request already
        timeout_graceful_shutdown=FINISH_SECONDS + LAST_WORDS_SECONDS,
    )
    server = Server(config, app.state.service.stop)
    await server.serve()
    if watch.death is not None:
        log.error("stopped because the engine died: %s", watch.death)
        return watch.death.exit_status
    return 0


def configure_logging(level: str) -> None:
    """Requests as bare JSON lines, everything else with time and level; both on stderr."""
    plain, lines = logging.StreamHandler(), logging.StreamHandler()
    plain.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    lines.setFormatter(logging.Formatter("%(message)s"))
    for name, handler in (("kakera", plain), ("kakera.requests", lines)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
