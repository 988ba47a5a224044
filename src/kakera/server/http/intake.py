"""The way of a body from its last byte to its job, off the event loop.

Large bodies have threads of their own, so that a small one never waits for them, and no more of them are on their way
than memory should hold. So have images: few bytes of one may be seconds of decoding, or of fetching it. Between slices
of the work it is asked whether anybody still waits for its end.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from kakera.errors import RequestRefused
from kakera.server.http.request_limits import LARGE_BYTES
from kakera.server.http.sse import ClientLeft
from kakera.text.tokenizer import Watch

T = TypeVar("T")
THREADS = 2
IMAGE_THREADS = 4  # two decode at a time (vision/reader.py), others fetch or tokenise
WHOLE_BODIES = 4  # of the largest size, or many more that are smaller
IDLE_SECONDS = 1.0  # after the last large body, before memory is given back

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give back by themselves


@dataclass(eq=False)
class Place:
    """What a large body takes of the intake, from its receipt until its job is made or refused."""

    size: int


_place: ContextVar[Place | None] = ContextVar("place", default=None)  # of the request whose task this is


class Intake:
    """`body_limit`: bytes of the largest body."""

    def __init__(self, body_limit: int):
        self._bytes = WHOLE_BODIES * body_limit
        self._pool = ThreadPoolExecutor(THREADS, "large-body")
        self._images = ThreadPoolExecutor(IMAGE_THREADS, "images")
        self._places: set[Place] = set()
        self._giving_back: asyncio.TimerHandle | None = None

    @contextmanager
    def place(self, size: int) -> Iterator[None]:
        """Raises RequestRefused (429) if the large bodies on their way are too many already."""
        if size <= LARGE_BYTES:
            yield
            return
        held = sum(place.size for place in self._places)
        if held + size > self._bytes:
            message = (
                f"{held} bytes of other large requests are being read and {self._bytes} is the limit; send it again"
            )
            raise RequestRefused(message, status=429, code="queue_full")
        place = Place(size)
        self._places.add(place)
        token = _place.set(place)
        try:
            yield
        finally:
            self.leave()
            _place.reset(token)

    def leave(self) -> None:
        """This request's body has become a job, or never will."""
        place = _place.get()
        if place is None or place not in self._places:
            return
        self._places.remove(place)
        self.give_back_soon()

    def give_back_soon(self) -> None:
        """Memory that a large body had, a while after the last of them."""
        if self._giving_back is not None:
            self._giving_back.cancel()
        self._giving_back = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._give_back)

    async def run(
        self, work: Callable[[Watch], T], check: Callable[[int], None] | None = None, *, images: bool = False
    ) -> T:
        """The work's result, from a thread. `check` raises for tokens that are too many; whoever cancels this ends the
        work at its next slice. `images`: it looks at some."""
        left = Event()

        def watch(tokens: int) -> None:
            if left.is_set():
                raise ClientLeft
            if check is not None:
                check(tokens)

        pool = self._images if images else self._pool if _place.get() is not None else None
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work, watch)
        finally:
            left.set()

    def _give_back(self) -> None:
        """The allocator keeps what a large body has freed, for ever if a small thing lies behind it."""
        if _malloc_trim is not None and not self._places:
            self._pool.submit(_malloc_trim, 0)
