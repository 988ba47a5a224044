"""Serve until told to stop, or until the engine dies: then answer who waits, and exit with its status."""

from __future__ import annotations

import logging

import uvicorn

from kakera.errors import EngineDied
from kakera.run.interface import AsyncEngine
from kakera.server.app import create_app
from kakera.server.health import EngineWatch
from kakera.server.model import ServedModel

log = logging.getLogger(__name__)
LAST_WORDS_SECONDS = 5  # for waiting requests to receive their error before sockets close


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
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
    )
    server = uvicorn.Server(config)
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
