"""Rows of a batch go through the application itself: they get what any client gets, and give way to all of them."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_engine import FakeEngine
from test_enforced import BODIES, CHAT

from kakera.batch.endpoint import Endpoint
from kakera.batch.servers import LocalServer, RemoteServer, Reply
from kakera.errors import EngineDied

STREAMS = [{"text": "Well."}]


def same(reply: Reply) -> tuple[int, dict]:
    """Without what differs each time."""
    body = json.loads(reply.body)
    return reply.status, {
        name: value for name, value in body.items() if name in ("choices", "content", "usage", "error")
    }


@pytest.mark.parametrize("body", [None, {"messages": "wrong"}])
@pytest.mark.parametrize("route", BODIES)
def test_a_row_gets_what_a_client_gets(serve, model, tmp_path, route, body):
    live = serve(STREAMS)
    engine = FakeEngine(tmp_path / "row.json", STREAMS)
    row = json.dumps(BODIES[route] if body is None else body).encode()

    async def local() -> Reply:
        async with LocalServer.over(engine, model, None, 60) as server:
            return await server.post(route, row)

    here = asyncio.run(local())
    there = asyncio.run(RemoteServer(Endpoint.of(live.url)).post(route, row))
    assert same(here) == same(there) and here.status == (200 if body is None else 400)
    if body is None:
        assert engine.requests[-1].background and live.engine.requests[-1].background


@pytest.mark.parametrize("how", ["dead", "stuck"])
def test_an_engine_that_dies_or_hangs_ends_the_batch(model, tmp_path, how):
    engine = FakeEngine(tmp_path / "row.json", STREAMS)
    setattr(engine, how, True)

    async def ask() -> None:
        async with LocalServer.over(engine, model, None, 0.6 if how == "stuck" else 60) as server:
            await server.post(CHAT, json.dumps(BODIES[CHAT]).encode())

    with pytest.raises(EngineDied):
        asyncio.run(ask())


def test_who_leaves_ends_the_request(serve, model, tmp_path):
    live = serve([{"text": "word " * 500, "delay_ms": 20}])

    async def leave() -> None:
        task = asyncio.create_task(RemoteServer(Endpoint.of(live.url)).post(CHAT, json.dumps(BODIES[CHAT]).encode()))
        while not live.engine.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    live.wait_until(lambda: live.engine.aborted)
