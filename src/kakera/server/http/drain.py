"""Drain: a server that stops finishes what it has begun, and sends what is new to other servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from kakera.server.http.errors import Refusals, error_body

log = logging.getLogger(__name__)
RETRY_SECONDS = 1  # another server can take it at once
TEXT = "this server finishes what it has begun and then stops; send it again, to another server if there is one"


class Drain:
    """Begins once and is over when no request is inside, or when its time is up and the others were given up."""

    def __init__(self, give_up: Callable[[], None]):
        self.began = False
        self.over = asyncio.Event()
        self.inside = 0  # requests whose answer is not sent to its end
        self._end_them = give_up
        self._limit: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> None:
        """Let running requests go on for so long; once more, for so long from now."""
        if self.over.is_set():
            return
        if self._limit is not None:
            self._limit.cancel()
        self._limit = asyncio.get_running_loop().call_later(seconds, self.give_up)
        self.began = True
        log.info("draining: %d requests may go on for %g seconds, new ones are refused", self.inside, seconds)
        self._look()

    def give_up(self) -> None:
        """Those that still run get an error now."""
        if not self.over.is_set():
            self.began = True
            self._end_them()
            self.over.set()

    def enter(self) -> None:
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        self._look()

    def _look(self) -> None:
        if self.began and not self.inside:
            if self._limit is not None:
                self._limit.cancel()
            self.over.set()


class DrainGate:
    """Before the routes in `paths`: counts their requests until the last byte of the answer, and answers 503 to those
    that come while the server drains, before it reads their bodies."""

    def __init__(self, app: ASGIApp, drain: Drain, paths: Collection[str], refusals: Refusals):
        self._app, self._drain, self._paths, self._refusals = app, drain, paths, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        if self._drain.began:
            headers = {"Retry-After": str(RETRY_SECONDS)}
            body = error_body(TEXT, 503, "draining")
            await self._refusals.answer(scope, 503, body, headers)(scope, receive, send)
            return
        self._drain.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.leave()
