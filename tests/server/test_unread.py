"""What waits for a client that does not read: how much, and for how long. No clock, machine or buffer decides."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections import Counter

import pytest
import uvicorn
from uvicorn.server import ServerState

from kakera.contract.events import Finished, Tokens, Usage
from kakera.contract.request import Sampling
from kakera.errors import RequestRefused
from kakera.server.choice import Job
from kakera.server.generate import UNREAD_DELTAS, Generation
from kakera.server.http.connection import LOOKS, UNREAD_SECONDS, TimedConnection
from kakera.server.metrics.prometheus import Metrics
from kakera.server.metrics.record import RequestRecord

TOKENS = 500


class Fountain:
    """An AsyncEngine whose answers are there at once, as far as they are asked for."""

    def __init__(self):
        self.asked: Counter[str] = Counter()

    async def stream(self, request):
        for _ in range(TOKENS):
            self.asked[request.id] += 1
            yield Tokens(request.id, (65,))
        yield Finished(request.id, "length", Usage(1, 0, TOKENS))

    def abort(self, request_id: str) -> None:
        raise AssertionError("no stop strings here")


def generation(model, choices: int) -> tuple[Fountain, Generation]:
    engine = Fountain()
    record = RequestRecord("one", "/v1/completions", 1, Metrics(), began=0.0)
    job = Job("one", (1,), Sampling(max_tokens=TOKENS, seed=1), choices=choices)
    return engine, Generation(engine, model.tokenizer, job, record)  # type: ignore[arg-type]


async def moments() -> None:
    """Let everybody who can go on do so."""
    for _ in range(20 * TOKENS):
        await asyncio.sleep(0)


@pytest.mark.parametrize("choices", [1, 2, 5])
def test_streams_are_read_on_as_the_client_reads(model, choices):
    async def read() -> None:
        engine, ours = generation(model, choices)
        async with contextlib.aclosing(ours.deltas()) as deltas:
            for taken in range(1, 40):
                await anext(deltas)
                await moments() if taken in (1, 39) else None
                assert engine.asked.total() <= taken + UNREAD_DELTAS + choices
            assert len(engine.asked) == choices, "none of them starves"
            text = "".join([delta.text async for delta in deltas])
        assert 0 < len(text) <= choices * TOKENS - 39 and engine.asked.total() == choices * TOKENS

    asyncio.run(read())


def test_an_error_comes_through_a_full_queue_and_leaving_ends_what_waits_in_it(model):
    async def read(error: Exception | None) -> None:
        engine, ours = generation(model, 3)
        async with contextlib.aclosing(ours.deltas()) as deltas:
            await anext(deltas)
            await moments()
            if error is not None:
                ours.end(error)
                with pytest.raises(RequestRefused, match="stopping"):
                    async for _ in deltas:
                        await asyncio.sleep(0)
        assert engine.asked.total() < TOKENS
        assert len(asyncio.all_tasks()) == 1, "somebody waits for room for ever"

    asyncio.run(read(RequestRefused("stopping")))
    asyncio.run(read(None))


class Hands:
    """Time, a connection's writer and its reader, moved by hand: an event loop and a transport."""

    def __init__(self):
        self.now, self.unread, self.aborted = 0.0, 0, False
        self.timers: list[tuple[float, asyncio.TimerHandle]] = []
        config = uvicorn.Config(lambda scope, receive, send: None, log_config=None)
        self.connection = TimedConnection(config, ServerState(), {}, _loop=self)  # type: ignore[arg-type]
        self.connection.connection_made(self)  # type: ignore[arg-type]
        self.connection._stop_time()

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str) -> None:
        return None

    def abort(self) -> None:
        self.aborted = True
        self.connection.connection_lost(ConnectionAbortedError())

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def call_later(self, seconds, work, *args) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self.now + seconds, work, args, self)
        self.timers.append((self.now + seconds, timer))
        return timer

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle) -> None:
        pass

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [each for each in self.timers if each[0] <= until]:
            first = min(due, key=lambda each: each[0])
            self.timers.remove(first)
            self.now = first[0]
            if not first[1].cancelled():
                first[1]._run()
        self.now = until


def test_what_a_reader_takes_counts_and_not_whether_there_is_room():
    """One that takes a byte a minute is kept for hours, one that stops is cut off after 60 to 75 seconds."""
    hands = Hands()
    hands.unread = 10_000
    hands.connection.pause_writing()
    for _ in range(200):
        hands.wait(UNREAD_SECONDS - 1)
        hands.unread -= 1
    assert not hands.aborted
    hands.wait(UNREAD_SECONDS - 1)
    assert not hands.aborted
    hands.wait(UNREAD_SECONDS / LOOKS + 2)
    assert hands.aborted
    hands = Hands()
    hands.unread = 10_000
    hands.connection.pause_writing()
    hands.wait(UNREAD_SECONDS - 1)
    hands.connection.resume_writing()
    hands.wait(10 * UNREAD_SECONDS)
    assert not hands.aborted, "nothing waits for it"


@pytest.mark.skipif(sys.platform != "linux", reason="what the kernel holds is told by Linux")
def test_what_the_kernel_holds_counts_as_unread_until_it_is_taken(monkeypatch):
    hands = Hands()
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.connect(listening.getsockname())
        sender, _ = listening.accept()
        with sender:
            sender.setblocking(False)
            monkeypatch.setattr(hands, "get_extra_info", lambda name: sender if name == "socket" else None)
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += sender.send(bytes(65536))
            assert 0 < hands.connection.unread_bytes <= sent
            while sent > 0:
                sent -= len(client.recv(65536))
            end = time.monotonic() + 60
            while hands.connection.unread_bytes > 0:
                assert time.monotonic() < end, "acknowledged within moments"
                time.sleep(0.01)
