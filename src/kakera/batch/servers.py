"""Who answers the rows of a batch: kakera's own application in this process, or a server somewhere else over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import h11

from kakera.batch.endpoint import Endpoint
from kakera.plan.plan import Plan
from kakera.run.interface import AsyncEngine
from kakera.server.app import create_app
from kakera.server.http.guard import PRIORITY
from kakera.server.model import ServedModel
from kakera.server.watch import EngineWatch
from kakera.server.watchdog import attendant
from kakera.service.notify import Notifier

CONNECT_SECONDS = 10.0  # to reach a server; an answer may take as long as it takes
HEADERS = [(b"content-type", b"application/json"), (b"user-agent", b"kakera-batch"), (PRIORITY, b"background")]


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Unreached(Exception):
    """No server took the request."""


class Broken(Exception):
    """A server took the request, and the connection ended before its reply did."""


class Server(Protocol):
    async def post(self, url: str, body: bytes) -> Reply:
        """What a POST of JSON to `url`, such as /v1/completions, gets. Raises Unreached, Broken, EngineDied. Cancelling
        aborts the request."""
        ...


class LocalServer:
    """The application itself, asked without a socket: what it says is what `kakera serve` says."""

    def __init__(self, app: Any, watch: EngineWatch, attending: asyncio.Task[None]):
        self._app, self._watch, self._attending = app, watch, attending

    @staticmethod
    @contextlib.asynccontextmanager
    async def over(
        engine: AsyncEngine, model: ServedModel, plan: Plan | None, stall: float
    ) -> AsyncIterator[LocalServer]:
        """Over an engine that has generated a token. `stall`: seconds without progress after which it hangs."""
        watch = EngineWatch(engine, stall_seconds=stall)
        app = create_app(engine, model, plan=plan, watch=watch)
        async with app.router.lifespan_context(app):
            attending = asyncio.ensure_future(attendant(Notifier.from_environment(), model.name)(watch))
            try:
                yield LocalServer(app, watch, attending)
            finally:
                attending.cancel()

    async def post(self, url: str, body: bytes) -> Reply:
        given = [{"type": "http.request", "body": body, "more_body": False}]
        start: dict[str, Any] = {}
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            if not given:
                await asyncio.Event().wait()  # for ever: who asks does not leave
            return given.pop()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))

        asked = asyncio.ensure_future(self._app(_scope(url, len(body)), receive, send))
        try:
            await asyncio.wait({asked, self._attending}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                self._attending.result()  # raises: the engine hangs
            await asked
        finally:
            asked.cancel()
        if start["status"] == 503:
            await self._watch.look()  # raises if the engine is gone
        return Reply(start["status"], dict(start["headers"]), b"".join(parts))


def _scope(url: str, length: int) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-length", b"%d" % length), *HEADERS],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
    }


class RemoteServer:
    """A connection a request: leaving it is what aborts the request."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint

    async def post(self, url: str, body: bytes) -> Reply:
        there = self.endpoint
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(there.host, there.port, ssl=there.scheme == "https")
        except (OSError, TimeoutError) as error:
            raise Unreached(getattr(error, "strerror", None) or str(error) or type(error).__name__) from None
        try:
            return await self._talk(reader, writer, there.base + url.removeprefix("/v1"), body)
        except (OSError, EOFError, h11.ProtocolError) as error:
            raise Broken(str(error) or type(error).__name__) from None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str, body: bytes
    ) -> Reply:
        connection = h11.Connection(h11.CLIENT)
        headers = [(b"host", self.endpoint.authority.encode()), (b"content-length", b"%d" % len(body)), *HEADERS]
        headers += [(b"connection", b"close")]
        if self.endpoint.key:
            headers.append((b"authorization", b"Bearer " + self.endpoint.key.encode()))
        for piece in (h11.Request(method="POST", target=target, headers=headers), h11.Data(body), h11.EndOfMessage()):
            writer.write(connection.send(piece) or b"")
        await writer.drain()
        status, parts = 0, []
        found: dict[bytes, bytes] = {}
        while True:
            match connection.next_event():
                case h11.Response() as response:
                    status, found = (
                        response.status_code,
                        {bytes(name): bytes(value) for name, value in response.headers},
                    )
                case h11.Data() as data:
                    parts.append(bytes(data.data))
                case h11.EndOfMessage():
                    return Reply(status, found, b"".join(parts))
                case h11.NEED_DATA:
                    connection.receive_data(await reader.read(65536))
                case h11.InformationalResponse():
                    pass
                case _:
                    raise EOFError("the connection ended before the reply")
