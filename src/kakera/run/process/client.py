"""EngineClient: starts the engine process and speaks with it from the server's event loop. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, cast

import zmq
import zmq.asyncio

from kakera.contract.events import EngineStats, Event, Finished, Flushed, RegionRead, SleepState, Tokens
from kakera.contract.request import Request
from kakera.errors import EngineDied, KakeraError, RequestRefused
from kakera.run.interface import EngineLimits
from kakera.run.process.engine_process import engine_main
from kakera.run.process.messages import (
    Abort,
    Accepted,
    Alive,
    Allow,
    Failed,
    Flush,
    FlushDone,
    Ready,
    Refused,
    Sleep,
    SleepDone,
    SleepRefused,
    Step,
    Submit,
    Sweep,
    SweepDone,
    WakeUp,
    decode_from_engine,
    encode,
)
from kakera.run.process.socket_place import make_socket_directory
from kakera.target.threads import patient_threads

STOP_SECONDS = 15.0  # of which 11 for what goes to the disk cache
LAST_WORDS_SECONDS = 0.5
# A request pauses when so many tokens wait for its reader: with 20 log-probabilities each 0.7 MB. Its reader may stop
# for the time of half of them before that costs it anything (a second of a 27B that decodes alone).
UNREAD_TOKENS = 256


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A child started inside is deaf to Ctrl-C, which goes to the whole group, for ever: seconds of imports pass before
    its code could ignore it. One that comes now reaches this process at the end."""
    resource_tracker.ensure_running()  # multiprocessing would start it inside, and that unblocks
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EngineClient:
    """Implements AsyncEngine. Use `await EngineClient.start(build)`; `await died()` returns when the engine is gone."""

    def __init__(self, process: Any, socket: zmq.asyncio.Socket, directory: Path):
        self.limits = EngineLimits(0, 0)
        self._process = process
        self._socket = socket
        self._directory = directory
        self._stats = EngineStats()
        self._streams: dict[str, asyncio.Queue[Event | RequestRefused | Accepted | EngineDied]] = {}
        self._unreported: set[str] = set()  # sent, and not counted by any report yet
        self._accepted: set[str] = set()  # of these, those that the next report counts
        self._asked: deque[asyncio.Future[Any]] = deque()  # flushes, sweeps, sleeps and wakings, answered in order
        self._dead = asyncio.Event()
        self._exit_code: int | None = None
        self._reader: asyncio.Task[None] | None = None
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_death)

    @staticmethod
    async def start(build: Callable[[], Any], *, computes: bool = False) -> EngineClient:
        """Start the process and wait until the model is loaded. Raises what the engine says if it can not start.

        `build` runs in the child: a picklable callable that returns a LocalEngine. `computes`: on the CPU, with
        threads that sleep while they wait.
        """
        directory = make_socket_directory()
        endpoint = f"ipc://{directory}/engine"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.bind(endpoint)
        process = multiprocessing.get_context("spawn").Process(
            target=engine_main, args=(endpoint, os.getpid(), build), name="kakera-engine", daemon=True
        )
        try:
            with patient_threads(computes), _interrupts_blocked():
                process.start()
        except BaseException:
            socket.close(linger=0)
            shutil.rmtree(directory, ignore_errors=True)
            raise
        client = EngineClient(process, socket, directory)
        try:
            await client._wait_ready()
        except BaseException:
            await client.close()
            raise
        client._reader = asyncio.create_task(client._read())
        return client

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    async def stats(self) -> EngineStats:
        """See AsyncEngine.stats."""
        if self._dead.is_set():
            raise EngineDied(self._death_text())
        waiting = self._stats.waiting + len(self._unreported)
        return replace(self._stats, waiting=waiting) if self._unreported else self._stats

    async def died(self) -> int:
        """Wait for the engine process to end; returns its exit code (negative: the signal)."""
        await self._dead.wait()
        return self._exit_code if self._exit_code is not None else 70

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """See AsyncEngine.stream."""
        if self._dead.is_set():
            raise EngineDied(self._death_text())
        if request.id in self._streams:  # the engine would refuse it too, but its answer would go to the wrong stream
            raise RequestRefused(f"a request with the id {request.id!r} is not finished yet", code="duplicate_id")
        queue: asyncio.Queue[Event | RequestRefused | Accepted | EngineDied] = asyncio.Queue()
        self._streams[request.id] = queue
        self._unreported.add(request.id)
        ended = False
        try:
            read, allowed = 0, UNREAD_TOKENS
            await self._socket.send(encode(Submit.of(request, allowed)))
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    ended = True
                    raise item
                if isinstance(item, Accepted):
                    continue
                ended = isinstance(item, Finished)
                yield item
                if ended:
                    return
                read += len(item.tokens) if isinstance(item, Tokens) else 0
                if read + UNREAD_TOKENS // 2 >= allowed:
                    allowed = read + UNREAD_TOKENS
                    await self._socket.send(encode(Allow(request.id, allowed)))
        finally:
            self._streams.pop(request.id, None)
            self._unreported.discard(request.id)
            if not ended and not self._dead.is_set():
                self._socket.send(encode(Abort(request.id)))  # zmq queues it at once; nothing to await on the way out

    def abort(self, request_id: str) -> None:
        """See AsyncEngine.abort."""
        if request_id in self._streams and not self._dead.is_set():
            self._socket.send(encode(Abort(request_id)))

    async def flush(self, disk: bool = False) -> Flushed:
        """See AsyncEngine.flush."""
        return cast("Flushed", await self._ask(Flush(disk)))

    async def sweep(self) -> list[RegionRead]:
        """See AsyncEngine.sweep."""
        return cast("list[RegionRead]", await self._ask(Sweep()))

    async def sleep(self, level: int) -> SleepState:
        """See AsyncEngine.sleep."""
        return cast("SleepState", await self._ask(Sleep(level)))

    async def wake_up(self) -> SleepState:
        """See AsyncEngine.wake_up."""
        return cast("SleepState", await self._ask(WakeUp()))

    async def _ask(self, question: Flush | Sweep | Sleep | WakeUp) -> Any:
        if self._dead.is_set():
            raise EngineDied(self._death_text())
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        await self._socket.send(encode(question))
        return await answer

    async def close(self) -> None:
        """End the engine process: SIGTERM, then SIGKILL. Streams that still wait raise EngineDied. Idempotent."""
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        if self._reader:
            self._reader.cancel()
        self._process.terminate()
        await asyncio.to_thread(self._process.join, STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._on_death()
        self._socket.close(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _wait_ready(self) -> None:
        death = asyncio.create_task(self._dead.wait())
        try:
            await self._take_ready(death)
        finally:
            death.cancel()

    async def _take_ready(self, death: asyncio.Task[Any]) -> None:
        while True:
            message = asyncio.ensure_future(self._socket.recv())
            await asyncio.wait({message, death}, return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                await asyncio.wait({message}, timeout=LAST_WORDS_SECONDS)  # Failed may have been sent just before
            if not message.done():
                message.cancel()
                raise EngineDied(self._death_text())
            answer = decode_from_engine(message.result())
            if isinstance(answer, Failed):
                error = KakeraError(answer.message)
                error.exit_status = answer.exit_status
                raise error
            if isinstance(answer, Ready):
                self.limits, self._stats = answer.limits, answer.stats
                return

    async def _read(self) -> None:
        while True:
            match decode_from_engine(await self._socket.recv()):
                case Step() as step:
                    self._report(step.stats)
                    for event in step.events:
                        self._put(event.request_id, event)
                case Alive(stats):
                    self._report(stats)
                case FlushDone(flushed, stats):
                    self._report(stats)
                    self._answer(flushed)
                case SweepDone(reads):
                    self._answer(reads)
                case SleepDone(state, stats):
                    self._report(stats)
                    self._answer(state)
                case SleepRefused(message, status, code):
                    self._answer(RequestRefused(message, status=status, code=code))
                case Accepted(request_id) as accepted:
                    self._accepted.add(request_id)
                    self._put(request_id, accepted)
                case Refused(request_id, message, status, code, param):
                    self._put(request_id, RequestRefused(message, status=status, code=code, param=param))

    def _answer(self, found: Flushed | list[RegionRead] | SleepState | RequestRefused) -> None:
        answer = self._asked.popleft()
        if answer.done():  # its caller may have left
            return
        if isinstance(found, RequestRefused):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def _report(self, stats: EngineStats) -> None:
        self._stats = stats
        self._unreported -= self._accepted
        self._accepted.clear()

    def _put(self, request_id: str, item: Event | RequestRefused | Accepted | EngineDied) -> None:
        if queue := self._streams.get(request_id):  # gone if the client has left
            queue.put_nowait(item)

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join(STOP_SECONDS)  # a process that waits for a broken driver can not even be killed
        self._exit_code = self._process.exitcode
        self._dead.set()
        for request_id in list(self._streams):
            self._put(request_id, EngineDied(self._death_text()))
        while self._asked:
            if not (answer := self._asked.popleft()).done():
                answer.set_exception(EngineDied(self._death_text()))

    def _death_text(self) -> str:
        return f"the engine process ended unexpectedly (exit code {self._exit_code}); restart the server"
