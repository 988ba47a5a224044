"""Sleep: the engine gives its card back, and takes it again when it is told to, or asked something."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from kakera.contract.events import SleepState
from kakera.errors import EngineDied, RequestRefused
from kakera.run.interface import AsyncEngine
from kakera.server.http.errors import Refusals, describe

log = logging.getLogger(__name__)
Mode = Literal["wait", "keep", "abort"]
RETRY_SECONDS = 30  # nobody knows how long a card is lent
POLL_SECONDS = 1.0
TEXT = "this server has lent its card and sleeps until POST /wake_up; send it again then, or to another server"
ABORTED = "the server was told to sleep at once (POST /sleep?mode=abort); send it again when it is awake"


@dataclass(frozen=True)
class IdleSleep:
    """Sleep by itself when nothing was asked for so many seconds; the next request wakes it."""

    seconds: float
    level: int = 1


class Sleep:
    """`level`: as SleepState's. `closed`: requests are not let in as they come, since it sleeps or is about to.
    `on_request`: then a request wakes the engine and waits for it, else it is refused."""

    def __init__(self, engine: AsyncEngine, interrupt: Callable[[Exception], None]):
        """`interrupt` gives everybody who waits for an answer this error."""
        self.level = 0
        self.on_request = False
        self.inside = 0  # requests whose answer is not sent to its end
        self._engine, self._interrupt = engine, interrupt
        self._falling = False
        self._wakings = 0  # that were asked for
        self._quiet = asyncio.Event()  # nobody is inside who is to end first
        self._turn = asyncio.Lock()  # of the engine: it falls asleep or wakes
        self._left_at = time.monotonic()

    @property
    def closed(self) -> bool:
        return self._falling or self.level > 0

    @property
    def text(self) -> str:
        """For people, while it is closed."""
        if not self.level:
            return "falls asleep: requests that run end first"
        until = "the next request wakes it" if self.on_request else "requests are refused until POST /wake_up"
        return f"asleep at level {self.level}: the card's memory is lent, and {until}"

    async def fall(self, level: int, mode: Mode, on_request: bool) -> SleepState:
        """Returns when the engine sleeps as deep or deeper. Those inside end first, or with `keep` wait in the engine
        and go on behind the sleep, or with `abort` get an error; asked once more, it need not wait as long.

        Raises RequestRefused: 409 if it is woken meanwhile, 503 if the host lacks memory; it stays awake then. Raises
        EngineDied.
        """
        wakings = self._wakings
        if not self._falling:
            self._quiet.clear()
        self._falling, self.on_request = True, on_request
        if mode == "keep" or not self.inside:
            self._quiet.set()
        elif mode == "abort":
            self._interrupt(RequestRefused(ABORTED, status=503, code="asleep"))
        log.info(
            "falling asleep: %d requests inside, new ones %s", self.inside, "wait" if on_request else "are refused"
        )
        await self._quiet.wait()
        async with self._turn:
            if wakings != self._wakings:
                raise RequestRefused("POST /wake_up came before it slept, so it is awake", status=409, code="woken")
            try:
                state = await self._engine.sleep(level)
                self.level = state.level
            finally:
                self._falling = False
        log.info("asleep at level %d after %.2f s%s", state.level, state.seconds, memory_asleep(state))
        return state

    async def wake(self) -> SleepState:
        """Returns when the engine is awake, which it may be already. Raises RequestRefused (503) if the card lacks
        memory; the engine sleeps on then. Raises EngineDied."""
        self._wakings += 1
        self._falling = False
        self._quiet.set()
        async with self._turn:
            if self.level == 0:
                return SleepState(0)
            state = await self._engine.wake_up()
            self.level = 0
            self._left_at = time.monotonic()
        log.info("awake after %.2f s", state.seconds)
        return state

    async def enter(self) -> None:
        """A request comes. Raises RequestRefused if it can not be let in, and EngineDied."""
        while self.closed:
            if not self.on_request:
                raise RequestRefused(TEXT, status=503, code="asleep")
            await self.wake()
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        self._left_at = time.monotonic()
        if not self.inside:
            self._quiet.set()

    async def when_idle(self, wish: IdleSleep) -> None:
        """Fall asleep whenever nobody has been inside for so long. Returns when the engine is gone."""
        while True:
            await asyncio.sleep(min(POLL_SECONDS, wish.seconds))
            if self.closed or self.inside or time.monotonic() - self._left_at < wish.seconds:
                continue
            try:
                await self.fall(wish.level, "wait", on_request=True)
            except RequestRefused as refused:
                self._left_at = time.monotonic()  # so long until it is tried again
                log.warning("no sleep after %g seconds without a request: %s", wish.seconds, refused)
            except EngineDied:
                return


def memory_asleep(state: SleepState) -> str:
    """What it holds, behind the rest of the line; on a CPU nothing is known and nothing is said."""
    card = f"{state.device_bytes / 1e9:.2f} GB of the card are in use by all programs" if state.device_bytes else ""
    host = f"{state.host_bytes / 1e9:.2f} GB of host memory hold the weights" if state.host_bytes else ""
    said = " and ".join(filter(None, (card, host)))
    return f": {said}" if said else ""


class SleepGate:
    """Before the routes in `paths`: lets a request in when the engine is awake, or answers that it is not."""

    def __init__(self, app: ASGIApp, sleep: Sleep, paths: Collection[str], refusals: Refusals):
        self._app, self._sleep, self._paths, self._refusals = app, sleep, paths, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        try:
            await self._sleep.enter()
        except (RequestRefused, EngineDied) as error:
            headers = {"Retry-After": str(RETRY_SECONDS)}
            await self._refusals.answer(scope, *describe(error), headers)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._sleep.leave()
