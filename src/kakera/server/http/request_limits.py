"""What a request may cost before it is one: bytes and number of headers, bytes of body, time until it is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kakera.server.http.errors import RETRY_AFTER_SECONDS, Refusals, error_body

HEADER_BYTES, HEADER_COUNT = 16 * 1024, 100
BODY_BYTES = 32 * 1024 * 1024  # at most; 262,144 tokens are about 1 MB of text
LEAST_BODY_BYTES = 4 * 1024 * 1024  # however small the context: a body may bring many prompts, and schemas
TOKEN_BYTES = 64  # of JSON, at least what a context is taken to hold for each token; 4 are usual
BODIES_HELD = 4  # of the largest size, or many smaller ones, may be on their way here at once
LARGE_BYTES = 64 * 1024  # of a body: 16K tokens, 0.1 s of one core to tokenise
BODY_SECONDS = 60.0  # 32 MB at 0.5 MB/s


def body_limit(context: int, longest_token: int, sees: bool = False) -> int:
    """Bytes of the longest body that is read: no prompt of so many fits into the context. Images (`sees`) have more
    bytes than tokens."""
    return BODY_BYTES if sees else max(LEAST_BODY_BYTES, min(BODY_BYTES, context * max(TOKEN_BYTES, longest_token)))


class _TooLong(Exception):
    """A body is longer than any may be."""


class _TooMany(Exception):
    """All bodies together are more than memory should hold."""


class RequestLimits:
    """431 for headers, 413 for a body that is too long, whether it says so or not, 408 for one that is too slow, and
    503 if all bodies that are being received hold too much. `emptied` is called when a large one is gone.

    Puts the time at which a request was whole into its state, from which its queue and first token are counted.
    """

    def __init__(
        self, app: ASGIApp, body_bytes: int, body_seconds: float, refusals: Refusals, emptied: Callable[[], None]
    ):
        self._app, self._refusals, self._emptied = app, refusals, emptied
        self._bytes, self._seconds = body_bytes, body_seconds
        self._held = 0  # bytes of bodies that are not whole yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        if len(headers) > HEADER_COUNT or sum(len(name) + len(value) for name, value in headers) > HEADER_BYTES:
            text = f"more than {HEADER_COUNT} headers or {HEADER_BYTES} bytes of them"
            await self._refuse(431, "headers_too_large", text, scope, receive, send)
            return
        declared = dict(headers).get(b"content-length", b"0")
        if int(declared) > self._bytes:  # h11 has seen that it is a number
            await self._too_long(f"has {declared.decode()} bytes", scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                messages = await self._whole(receive)
        except TimeoutError:
            text = f"the request body did not end within {self._seconds:g} seconds"
            await self._refuse(408, "body_too_slow", text, scope, receive, send)
            return
        except _TooLong:
            await self._too_long(f"is longer than {self._bytes} bytes", scope, receive, send)
            return
        except _TooMany:
            text = f"other requests whose bodies are being received hold {self._held} bytes; send it again"
            await self._refuse(503, "bodies_in_flight", text, scope, receive, send)
            return
        if messages[-1]["type"] == "http.disconnect":
            return  # before the body was whole, or before anybody looked at it
        scope.setdefault("state", {})["received"] = time.monotonic()
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _whole(self, receive: Receive) -> list[Message]:
        """Read here, so that the routes never see a body without an end. Raises _TooLong, _TooMany."""
        messages: list[Message] = []
        size = 0
        try:
            while True:
                message = await receive()
                messages.append(message)
                received = len(message.get("body", b""))
                size += received
                self._held += received
                if size > self._bytes:
                    raise _TooLong
                # small ones are still let in when large ones have filled their share
                if self._held > BODIES_HELD * self._bytes * (1 if size > LARGE_BYTES else 2):
                    raise _TooMany
                if message["type"] != "http.request" or not message.get("more_body"):
                    return messages
        finally:
            self._held -= size
            if size > LARGE_BYTES:
                self._emptied()

    async def _too_long(self, what: str, scope: Scope, receive: Receive, send: Send) -> None:
        text = (  # agents take the first words, or the last ones, for a history to be shortened
            f"request entity too large: the body {what} and the limit is {self._bytes} bytes, which follows from the "
            "server's --context, so the prompt is too long"
        )
        await self._refuse(413, "body_too_large", text, scope, receive, send)

    async def _refuse(self, status: int, code: str, text: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 503 else None
        await self._refusals.answer(scope, status, error_body(text, status, code), headers)(scope, receive, send)
