"""vllm-router, which hears what is cached, in front of two servers: conversations spread over both, each stays where
its prefix is, every dialect gets through, and a server that drains loses no request."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from command_server import CommandServer, free_port, free_port_pair

pytest.importorskip("vllm_router", reason="vllm-router comes with the extra `clients`")

CHAT = "/v1/chat/completions"
START_SECONDS = 60
PAGE = 64  # tokens; a page that is not full is not cached


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[CommandServer]]:
    path: Path = tmp_path_factory.mktemp("router") / "script.json"
    streams = [{"text": "Thought.\n</think>\n\nWell.", "delay_ms": 60}]
    streams.append({"match": "slow", "text": "Thought.\n</think>\n\n" + "word " * 40, "delay_ms": 60})
    path.write_text(json.dumps({"streams": streams}))
    with contextlib.ExitStack() as stack:
        told = [f"tcp://127.0.0.1:{free_port_pair()}" for _ in range(2)]
        started = [CommandServer(f"scripted:{path}", "--served-name", "mini", "--kv-events", place) for place in told]
        yield [stack.enter_context(server) for server in started]


@pytest.fixture(scope="module")
def router(servers: list[CommandServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """It asks each server where its events are."""
    port, log = free_port(), tmp_path_factory.mktemp("log") / "router"
    workers = [f"http://127.0.0.1:{server.port}" for server in servers]
    address = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    address += ["--health-check-interval-secs", "2"]
    command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "kv_aware", *address]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--worker-urls", *workers], stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            wait_until_it_has(2, client, process, log)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=20)


def wait_until_it_has(workers: int, client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            listed = client.get("/workers").json()["workers"]
            if len([worker for worker in listed if worker["is_healthy"]]) == workers:
                return
        time.sleep(0.1)


class Conversation:
    """Every turn sends the whole conversation, as clients do."""

    def __init__(self, router: httpx.Client, word: str):
        self._router = router
        self._messages: list[dict[str, Any]] = []
        self._opening = f"{word} " * 300

    def turn(self) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were cached."""
        self._messages.append({"role": "user", "content": "And then?" if self._messages else self._opening})
        answer = self._router.post(CHAT, json={"model": "mini", "messages": self._messages})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        self._messages.append(body["choices"][0]["message"])
        return body["usage"]["prompt_tokens"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_until_one_runs(servers: list[CommandServer]) -> None:
    end = time.monotonic() + 60
    while sum(server.http.get("/v1/loads").json()["aggregate"]["total_reqs"] for server in servers) != 1:
        assert time.monotonic() < end
        time.sleep(0.01)


def prompt_tokens(server: CommandServer) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("kakera_prompt_tokens_total"))


@pytest.mark.slow
def test_each_conversation_stays_where_it_is_cached(router: httpx.Client, servers: list[CommandServer]) -> None:
    before = [prompt_tokens(server) for server in servers]
    conversations = [Conversation(router, word) for word in ("fox", "owl")]
    with ThreadPoolExecutor() as pool:
        turns = [pool.submit(conversations[0].turn)]
        wait_until_one_runs(servers)  # the router sends what is new to the server with fewer requests
        turns.append(pool.submit(conversations[1].turn))
        first = [turn.result() for turn in turns]
    assert [cached for _, cached in first] == [0, 0]
    opened = [prompt_tokens(server) - count for server, count in zip(servers, before, strict=True)]
    assert sorted(opened) == sorted(tokens for tokens, _ in first), "both conversations began on one server"
    for _ in range(2):
        for (tokens, _), conversation in zip(first, conversations, strict=True):
            _, cached = conversation.turn()
            assert cached > tokens - 2 * PAGE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}),
        ("/v1/responses", {"input": "Hello"}),
    ],
)
def test_every_dialect_gets_through(router: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Claude Code and Codex are behind it as they are without it."""
    answer = router.post(path, json={"model": "mini", **body})
    assert answer.status_code == 200 and "Well." in answer.text, answer.text
    assert router.post(path, json={"model": "other", **body}).status_code in (400, 404)


@pytest.mark.slow
def test_a_server_that_drains_loses_no_request(router: httpx.Client, servers: list[CommandServer]) -> None:
    """The last test: one of the servers ends."""
    ask = {"model": "mini", "messages": [{"role": "user", "content": "slow"}], "stream": True}
    with router.stream("POST", CHAT, json=ask) as stream:
        lines = stream.iter_lines()
        next(lines)
        [server] = [each for each in servers if each.http.get("/v1/loads").json()["aggregate"]["total_reqs"]]
        assert server.http.post("/drain").json()["requests"] == 1
        for word in ("fox", "owl", "elk"):
            assert Conversation(router, word).turn()[0] > 0
        rest = list(lines)
    assert "data: [DONE]" in rest
    assert server.process.wait(timeout=START_SECONDS) == 0
    assert router.post(CHAT, json={**ask, "stream": False}).status_code == 200
