"""A server that drains: what runs ends as it should, what is new goes elsewhere, and then it stops with status 0."""

import asyncio
import signal
import threading
import time

import httpx
import pytest
import uvicorn
from fake_engine import FakeEngine
from test_life import Served

from kakera.server.app import create_app
from kakera.server.http.access import Access
from kakera.server.http.drain import Drain
from kakera.server.run import Server

WORDS = [{"text": "a word and another one"}]
NEW = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi", "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/responses": {"input": "hi", "stream": True},
}


class Draining:
    """A server, a whole and a streamed answer that hang in their first step, and a client beside them."""

    def __init__(self, model, path):
        self.engine = FakeEngine(path, WORDS)
        self.engine.stuck = True
        self.served = Served(self.engine, model)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.served.port}", timeout=20)
        self.answers: dict[bool, httpx.Response] = {}
        self.threads = [threading.Thread(target=self._ask, args=(stream,)) for stream in (False, True)]
        for thread in self.threads:
            thread.start()
        end = time.monotonic() + 60
        while len(self.engine.open) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)

    def _ask(self, stream: bool) -> None:
        url = f"http://127.0.0.1:{self.served.port}/v1/completions"
        self.answers[stream] = httpx.post(url, json={"prompt": "hi", "stream": stream}, timeout=20)

    def end(self) -> int | None:
        for thread in (*self.threads, self.served.thread):
            thread.join(20)
        return self.served.status


@pytest.fixture
def draining(model, tmp_path):
    return Draining(model, tmp_path / "script.json")


def test_running_requests_end_new_ones_go_elsewhere_and_the_status_is_0(draining):
    http = draining.http
    assert http.post("/drain", json={"seconds": 600}).json() == {"status": "draining", "requests": 2, "seconds": 600}
    health = http.get("/health")
    assert health.status_code == 503 and health.json() == {"status": "draining", "running": 2, "waiting": 0}
    assert http.get("/health?ready=0").json() == {"status": "ok", "running": 2, "waiting": 0}
    assert http.get("/server_info").json()["status"] == "draining"
    assert http.post("/tokenize", json={"prompt": "hi"}).status_code == 200
    for path, body in NEW.items():
        refused = http.post(path, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), path
        error = refused.json()["error"]
        assert "another server" in error["message"]
        assert error["type"] == "api_error" if path == "/v1/messages" else error["code"] == "draining"
    draining.engine.stuck = False
    assert draining.end() == 0
    assert draining.answers[False].json()["choices"][0]["text"] == "a word and another one"
    assert draining.answers[True].text.endswith("data: [DONE]\n\n")
    assert len(draining.engine.requests) == 2 and draining.engine.aborted == []


def test_who_is_not_done_in_time_gets_an_error_and_the_status_is_0(draining):
    draining.http.post("/drain", json={"seconds": 600})
    assert draining.http.post("/drain", json={"seconds": 0}).status_code == 200
    assert draining.end() == 0
    assert draining.answers[False].status_code == 503 and "retry-after" in draining.answers[False].headers
    assert all('"server_stopping"' in answer.text for answer in draining.answers.values())


def test_who_may_drain(model, tmp_path):
    """(the client's address, headers): without keys this machine alone, with keys whoever has one."""
    key, page = {"x-api-key": "k"}, {"origin": "http://evil.example"}
    open_cases = [("10.0.0.7", {}, 403), ("127.0.0.1", page, 403), ("127.0.0.1", {}, 200)]
    keyed_cases = [("127.0.0.1", {}, 401), ("10.0.0.7", key, 200)]

    async def ask(keys, cases) -> None:
        app = create_app(FakeEngine(tmp_path / "script.json", WORDS), model, access=Access(keys=keys))
        for address, headers, expected in cases:
            transport = httpx.ASGITransport(app, client=(address, 50000))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                assert (await http.post("/drain", headers=headers)).status_code == expected, (address, headers)
            assert app.state.service.drain.began == (expected == 200)

    asyncio.run(ask((), open_cases))
    asyncio.run(ask(("k",), keyed_cases))


@pytest.mark.parametrize("posted", [False, True])
def test_a_signal_drains_does_not_shorten_what_was_posted_and_a_second_one_ends(posted):
    async def run() -> None:
        ended: list[str] = []
        drain = Drain(lambda: ended.append("all"))
        server = Server(uvicorn.Config("none"), drain, 0 if posted else 600, asyncio.Event().wait)
        server._loop = asyncio.get_running_loop()
        drain.enter()
        if posted:
            drain.begin(600)
        server.handle_exit(signal.SIGTERM, None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert drain.began and not drain.over.is_set() and not server.should_exit
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.wait_for(drain.over.wait(), 10)
        assert ended == ["all"] and not server.should_exit
        server.handle_exit(signal.SIGTERM, None)
        assert server.should_exit

    asyncio.run(run())


def test_an_idle_server_stops_at_once():
    async def run() -> None:
        drain = Drain(lambda: None)
        drain.begin(600)
        assert drain.over.is_set()

    asyncio.run(run())
