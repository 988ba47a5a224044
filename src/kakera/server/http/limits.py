"""What a request may cost before it is one: bytes and number of headers, bytes of body, time until it is complete."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import resource
import socket
import struct
import termios
import time
from typing import Any, ClassVar

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kakera.server.http.errors import Refusals, error_body

log = logging.getLogger(__name__)

HEADER_BYTES, HEADER_COUNT = 16 * 1024, 100
BODY_BYTES = 32 * 1024 * 1024  # at most; 262,144 tokens are about 1 MB of text
LEAST_BODY_BYTES = 4 * 1024 * 1024  # however small the context: a body may bring many prompts, and schemas
TOKEN_BYTES = 64  # of JSON, at least what a context is taken to hold for each token; 4 are usual
BODY_SECONDS = 60.0  # 32 MB at 0.5 MB/s
REQUEST_SECONDS = BODY_SECONDS + 5  # later than the answer that a slow body gets
KEEP_ALIVE_SECONDS = 5  # between requests of a connection
UNREAD_SECONDS = 60.0  # in which a client must take something of an answer that waits for it
LOOKS = 4  # at what it took, in that time
UNSENT_BYTES = 64 * 1024  # of an answer that the kernel holds back; by itself it takes megabytes from a fast server
OPEN_FILES = 65_536


def body_limit(context: int, longest_token: int) -> int:
    """Bytes of the longest body that is read: no prompt of so many fits into the context."""
    return max(LEAST_BODY_BYTES, min(BODY_BYTES, context * max(TOKEN_BYTES, longest_token)))


class RequestLimits:
    """431 for headers, 413 for a body that is too long, whether it says so or not, and 408 for one that is too slow.

    Puts the time at which a request was whole into its state, from which its queue and first token are counted.
    """

    def __init__(self, app: ASGIApp, body_bytes: int, body_seconds: float, refusals: Refusals):
        self._app, self._refusals = app, refusals
        self._bytes, self._seconds = body_bytes, body_seconds

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
        if messages is None:
            await self._too_long(f"is longer than {self._bytes} bytes", scope, receive, send)
            return
        if messages[-1]["type"] == "http.disconnect":
            return  # before the body was whole, or before anybody looked at it
        scope.setdefault("state", {})["received"] = time.monotonic()
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _whole(self, receive: Receive) -> list[Message] | None:
        """Read here, so that the routes never see a body without an end. None if it is too long."""
        messages: list[Message] = []
        size = 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > self._bytes:
                return None
            if message["type"] != "http.request" or not message.get("more_body"):
                return messages

    async def _too_long(self, what: str, scope: Scope, receive: Receive, send: Send) -> None:
        text = f"the request body {what}; the limit is {self._bytes} bytes, which follows from the server's --context"
        await self._refuse(413, "body_too_large", text, scope, receive, send)

    async def _refuse(self, status: int, code: str, text: str, scope: Scope, receive: Receive, send: Send) -> None:
        await self._refusals.answer(scope, status, error_body(text, status, code))(scope, receive, send)


class TimedConnection(H11Protocol):
    """Closes a connection whose request is not complete in time, or whose answer is not read in time, which uvicorn
    would hold for ever.

    This bounds headers that trickle, connections that say nothing, bodies that trickle on after their refusal, and
    answers that pile up for a client which does not read them.
    """

    seconds: ClassVar[float] = REQUEST_SECONDS
    unread_seconds: ClassVar[float] = UNREAD_SECONDS
    _deadline: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        with contextlib.suppress(OSError, AttributeError, TypeError):  # no TCP, or a loop or system that can not
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._keep_time()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._keep_time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_time()
        self._stop_unread()

    def pause_writing(self) -> None:
        """64 KiB wait, beside what the kernel holds."""
        super().pause_writing()
        self._look_later(self.unread_bytes, looks=LOOKS)

    def _look_later(self, before: int, looks: int) -> None:
        """`before` bytes were unread when the client last took some; it has so many looks left."""
        self._look = self.loop.call_later(self.unread_seconds / LOOKS, self.look_at_reader, before, looks - 1)

    def look_at_reader(self, before: int, looks: int) -> None:
        """Whether a client reads is seen by what it takes, not by whether there is room to write, which a slow reader
        does not make for minutes."""
        if (unread := self.unread_bytes) < before:
            self._look_later(unread, looks=LOOKS)
        elif looks > 0:
            self._look_later(before, looks)
        else:
            log.warning("a client took nothing of its answer for %g seconds and was cut off", self.unread_seconds)
            self.transport.abort()

    @property
    def unread_bytes(self) -> int:
        """Of the answer, here and in the kernel, that the client's machine has not taken. While writing pauses nothing
        is added."""
        return self.transport.get_write_buffer_size() + _in_kernel(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def _keep_time(self) -> None:
        """From a request's first byte, or the connection's begin, to its last byte; further bytes win no time."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_time()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.seconds, self.transport.close)

    def _stop_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_unread(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None


def _in_kernel(transport: asyncio.Transport) -> int:
    """Bytes sent that the other side has not acknowledged: a full one acknowledges as its program reads. 0 where the
    system does not tell."""
    try:
        told = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, AttributeError):  # closed, or none
        return 0
    return int(struct.unpack("i", told)[0])


def allow_open_files() -> None:
    """Connections are open files: shells and systemd start programs with 1,024 of them, but let them have more."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # then it stays as it was
        wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


# h11 even where httptools is installed, which has no limit for headers; without websockets every request passes here
CONNECTIONS: dict[str, Any] = {
    "http": TimedConnection,
    "ws": "none",
    "h11_max_incomplete_event_size": HEADER_BYTES,
    "timeout_keep_alive": KEEP_ALIVE_SECONDS,
}
