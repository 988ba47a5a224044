"""What a connection may cost: the time until its request is complete, and what a client does not read of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import resource
import socket
import struct
import termios
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kakera.server.http.request_limits import BODY_SECONDS, HEADER_BYTES

log = logging.getLogger(__name__)

REQUEST_SECONDS = BODY_SECONDS + 5  # later than the answer that a slow body gets
# Between requests of a connection. Longer than clients and proxies keep one (60 to 120 s), or they would send on a
# connection that is just being closed.
KEEP_ALIVE_SECONDS = 130
UNREAD_SECONDS = 60.0  # in which a client must take something of an answer that waits for it
LOOKS = 4  # at what it took, in that time
UNSENT_BYTES = 64 * 1024  # of an answer that the kernel holds back; by itself it takes megabytes from a fast server
OPEN_FILES = 65_536


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
