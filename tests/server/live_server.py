"""A real uvicorn on a free port, in a thread, over the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from fake_engine import FakeEngine

import kakera
from kakera.server.app import create_app
from kakera.server.http.access import Access
from kakera.server.http.connection import CONNECTIONS, TimedConnection
from kakera.server.model import ServedModel
from kakera.server.watch import EngineWatch

if TYPE_CHECKING:
    import openai  # a second to import

MINI = Path(kakera.__file__).parent / "data" / "mini"
ACCESS = ("keys", "allowed_hosts", "origins", "cache_per_key")
APP = ("body_limit", "body_seconds", "plan", "kv_events")


@dataclass
class Live:
    url: str
    engine: FakeEngine
    model: ServedModel
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=20, verify=False)  # which would read 150 certificates

    @functools.cached_property
    def client(self) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, http_client=self.http)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, text: str = "hi", **more: Any) -> httpx.Response:
        more.setdefault("chat_template_kwargs", {"enable_thinking": False})
        return self.post("/v1/chat/completions", model="mini", messages=[{"role": "user", "content": text}], **more)

    def events(self, response: httpx.Response) -> list[dict]:
        """The stream's chunks; it must end with [DONE]."""
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def wait_until(self, condition: Callable[[], Any]) -> None:
        wait_until(condition)

    def leave(self, path: str, body: dict[str, Any], reached: Callable[[], Any] = lambda: True) -> None:
        """Ask, and hang up as soon as a request is open in the engine and `reached` holds."""
        hang_up(self.url, path, body, lambda: self.engine.open and reached())


def wait_until(condition: Callable[[], Any]) -> None:
    """A minute at most: the machine may be busy."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def hang_up(url: str, path: str, body: dict[str, Any] | None, reached: Callable[[], Any]) -> None:
    """A client that asks (GET without a body) and leaves its answer when `reached` holds."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        text, headers = json.dumps(body), {"content-type": "application/json"}
        connection.request(*(("GET", path) if body is None else ("POST", path, text, headers)))
        wait_until(reached)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def start(model: ServedModel, path: Path, streams: list[dict], **options: Any) -> Iterator[Live]:
    access = Access.when_bound("127.0.0.1", **{key: options.pop(key) for key in ACCESS if key in options})
    app_options = {key: options.pop(key) for key in APP if key in options}
    connections = {**CONNECTIONS, "http": options.pop("http", TimedConnection)}
    stall = options.pop("stall_seconds", 60.0)
    engine = FakeEngine(path, streams, **options)
    watch = EngineWatch(engine, stall_seconds=stall, poll_seconds=0.05)
    app = create_app(engine, model, watch=watch, access=access, **app_options)
    port = free_port()
    config = uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=2, **connections)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    live = Live(f"http://127.0.0.1:{port}", engine, model)
    try:
        yield live
    finally:
        live.http.close()
        server.should_exit = True
        thread.join(5)


HELLO = [
    {"match": "fox", "pieces": ["The quick br", "own", " f", "ox", " jumps"]},
    {"match": "user-turn", "pieces": ["Hi", "\n", "Use"]},
    {"match": "emoji", "pieces": ["a", {"bytes": "f0"}, {"bytes": "9f"}, {"bytes": "98"}, {"bytes": "80"}, "b"]},
    {"match": "halfway", "pieces": ["a", {"bytes": "f0"}, {"bytes": "9f"}]},
    {"match": "ponder", "text": "I should greet.\n</think>\n\nHello!"},
    {"match": "endless", "text": "word " * 3000},
    {"text": "Hello there."},
]
