"""Server-sent events, and answering clients that may leave at any moment.

Starlette notices a lost client only when it sends. A request in prefill sends nothing for seconds, so both kinds of
answer here listen for the disconnect beside their work and cancel the work when it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kakera.errors import KakeraError
from kakera.server.http.errors import describe

T = TypeVar("T")
log = logging.getLogger(__name__)

HEADERS_AFTER_SECONDS = 5.0  # a refusal comes at once; whoever waits longer wants to see that the server lives
PING_SECONDS = 10.0
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; nginx's number for the log
# Within JSON they stand in strings alone. Readers that split lines by Unicode's rules, as Python's do, cut there.
LINE_ENDS = {ord(end): json.dumps(end)[1:-1] for end in "\u0085\u2028\u2029"}
DONE = "data: [DONE]\n\n"


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


def event(payload: dict[str, Any], name: str | None = None) -> str:
    head = f"event: {name}\n" if name else ""
    text = json.dumps(payload, ensure_ascii=False)
    return f"{head}data: {text if text.isascii() else text.translate(LINE_ENDS)}\n\n"


def comment(text: str) -> str:
    """What clients pass over, and a person who looks at the stream reads."""
    return f": {text}\n\n"


class Reply(ABC):
    """What a dialect makes of a request. One of `whole` and `stream` is called, once. A stream shows that it still
    works, and that it failed, as OpenAI's do, unless its dialect has other ways."""

    @abstractmethod
    async def whole(self) -> dict[str, Any]: ...

    @abstractmethod
    def stream(self) -> AsyncGenerator[str]: ...

    def still_works(self) -> str:
        """Sent between two chunks when none came for a while."""
        return comment("still working")

    def failed(self, error: Exception) -> str:
        """The last events of a stream that an error ended."""
        return event(describe(error)[1])


async def answer(request: Request, reply: Coroutine[Any, Any, Reply], stream: bool | None) -> Response:
    """The reply whole, or as a stream. Raises ClientLeft, and what ends the reply before its first byte is sent."""
    ready = await unless_disconnected(request, reply)
    if stream:
        return await open_stream(request, ready)
    return JSONResponse(await unless_disconnected(request, ready.whole()))


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. Cancels it and raises ClientLeft if the client goes away first."""
    task = asyncio.create_task(work)
    left = asyncio.create_task(_disconnect(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        await _cancel(task, left)


async def open_stream(request: Request, reply: Reply) -> EventStream:
    """Wait for the first chunk, so that a refusal still gets its own status; then stream.

    Raises what the stream raises before its first chunk, and ClientLeft.
    """
    chunks = reply.stream()
    first = asyncio.create_task(anext(chunks))
    left = asyncio.create_task(_disconnect(request.receive))
    try:
        await asyncio.wait({first, left}, timeout=HEADERS_AFTER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if left.done() and not first.done():
            raise ClientLeft
        if first.done():
            first.result()
    except BaseException:
        await _cancel(first, left)
        await chunks.aclose()
        raise
    return EventStream(reply, chunks, first, left)


class EventStream(Response):
    """Sends chunks as they come, a ping when nothing came for a while, and an error as the last event."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, chunks: AsyncGenerator[str], first: asyncio.Task[str], left: asyncio.Task[None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._next = first
        self._left = left
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if not self._next.done():
                await _send(send, self._reply.still_works())
            await self._relay(send)
        except OSError:
            pass  # the client went away while we sent
        finally:
            await _cancel(self._next, self._left)
            await self._chunks.aclose()

    async def _relay(self, send: Send) -> None:
        while True:
            await asyncio.wait({self._next, self._left}, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if self._left.done():
                return
            if not self._next.done():
                await _send(send, self._reply.still_works())
                continue
            try:
                chunk = self._next.result()
            except StopAsyncIteration:
                await _send(send, "", more=False)
                return
            except Exception as error:
                if not isinstance(error, KakeraError):
                    log.exception("a stream failed")
                await _send(send, self._reply.failed(error), more=False)
                return
            await _send(send, chunk)
            self._next = asyncio.create_task(anext(self._chunks))


async def _send(send: Send, text: str, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception, StopAsyncIteration):
            await task
