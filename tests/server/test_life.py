"""Clients that leave, engines that die or hang, and what an operator can see."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import free_port, hang_up

from kakera.errors import EngineDied
from kakera.server.http.connection import TimedConnection
from kakera.server.run import serve as serve_until_stopped
from kakera.server.service import Service

SLOW = [{"match": "slow", "text": "word " * 2000, "delay_ms": 5}, {"text": "Hello."}]
BODY = {"messages": [{"role": "user", "content": "slow"}], "chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture
def slow(serve):
    return serve(SLOW)


CHAT = "/v1/chat/completions"


def test_leaving_a_stream_stops_the_request(slow):
    with slow.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()  # kept: when it is collected, httpx closes the stream
        next(lines)
        assert slow.engine.open
    slow.wait_until(lambda: not slow.engine.open)
    assert len(slow.engine.aborted) == 1


def test_leaving_during_prefill_stops_the_request_streaming_or_not(slow):
    slow.engine.prefill_seconds = 30
    for stream in (True, False):
        slow.leave(CHAT, {**BODY, "stream": stream})
        slow.wait_until(lambda: not slow.engine.open)
    assert len(slow.engine.aborted) == 2
    slow.engine.prefill_seconds = 0


FORM = {"type": "json_schema", "schema": {"type": "object"}}
FORMED = {
    "/v1/chat/completions": {**BODY, "guided_regex": "a"},
    "/v1/completions": {"prompt": "hi", "guided_regex": "a"},
    "/v1/messages": {"messages": BODY["messages"], "max_tokens": 9, "output_config": {"format": FORM}},
    "/v1/responses": {"input": "hi", "text": {"format": {**FORM, "name": "a"}}},
}


@pytest.mark.parametrize("path", FORMED)
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_the_job_is_made_ends_that(slow, monkeypatch, path, stream):
    made: list[str] = []

    async def compiled(work):
        made.append("begun")
        try:
            await asyncio.sleep(30)
        finally:
            made.append("ended")

    monkeypatch.setattr("kakera.server.openai.constrain._apart", compiled)
    hang_up(slow.url, path, {**FORMED[path], "stream": stream}, lambda: made)
    slow.wait_until(lambda: "ended" in made and "kakera_aborted_total 1.0" in slow.http.get("/metrics").text)
    assert slow.engine.requests == []


def test_leaving_a_whole_answer_stops_all_its_choices(slow):
    slow.leave(CHAT, {**BODY, "n": 3}, lambda: len(slow.engine.open) == 3)
    slow.wait_until(lambda: not slow.engine.open)
    assert len(slow.engine.aborted) == 3


def test_leaving_while_queued_frees_the_place(serve):
    server = serve(SLOW, slots=0)
    hang_up(server.url, CHAT, {**BODY, "stream": True}, lambda: server.engine.waiting == 1)
    server.wait_until(lambda: server.engine.waiting == 0)


def test_twenty_aborts_leave_a_clean_log_and_a_working_server(slow, caplog):
    for _ in range(20):
        with slow.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            next(response.iter_lines())
    slow.wait_until(lambda: not slow.engine.open)
    assert slow.chat().json()["choices"][0]["message"]["content"] == "Hello."
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_one_log_line_a_request_without_its_text(slow, caplog):
    caplog.set_level(logging.INFO, "kakera.requests")
    slow.chat("my secret")
    slow.leave(CHAT, BODY)
    slow.wait_until(lambda: len(caplog.records) >= 2)
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "kakera.requests"]
    assert [line["finish"] for line in lines] == ["stop", "abort"]
    assert lines[0]["cached"] == 7 and lines[0]["miss"] == "cold" and lines[0]["ttft_s"] >= 0
    assert lines[0]["prompt"] == len(slow.engine.requests[0].tokens) and lines[0]["generated"] > 1
    assert {line["client"] for line in lines} == {"127.0.0.1"} and "prompt_tokens_per_s" in lines[0]
    assert "secret" not in caplog.text and "Hello" not in caplog.text


def test_metrics_count_what_happened(slow):
    slow.chat()
    slow.chat(max_tokens=1)
    text = slow.http.get("/metrics").text
    for line in (
        'kakera_requests_total{finish_reason="stop",route="/v1/chat/completions"} 1.0',
        'kakera_requests_total{finish_reason="length",route="/v1/chat/completions"} 1.0',
        "kakera_cached_tokens_total 14.0",
        'kakera_cache_misses_total{reason="cold"} 2.0',
        "kakera_time_to_first_token_seconds_count 2.0",
        "kakera_running 0.0",
        'kakera_engine_counter{name="evictions"} 3.0',
    ):
        assert line in text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_a_defect_is_a_500_in_words_and_the_connection_lives_on(slow, monkeypatch, caplog, path):
    def broken(*_, **__):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Service, "generation", broken)
    said = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    body = said.get(path, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    with contextlib.closing(http.client.HTTPConnection(slow.url.removeprefix("http://"), timeout=60)) as connection:
        for _ in range(3):
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            sock, response = connection.sock, connection.getresponse()
            assert response.status == 500 and "log says more" in json.loads(response.read())["error"]["message"]
            assert connection.sock is sock, "closed"
    assert len([r for r in caplog.records if r.exc_info and "a defect" in str(r.exc_info[1])]) == 3
    assert slow.http.get("/metrics").text.count(f'finish_reason="internal_error",route="{path}"}} 3.0') == 1


def test_models_tokenize_and_detokenize(slow):
    models = slow.client.models.list().data
    assert [m.id for m in models] == ["mini"] and slow.client.models.retrieve("mini").id == "mini"
    assert slow.http.get("/v1/models/other").status_code == 404
    text = "Grüße <|im_end|> 😀"
    tokens = slow.post("/tokenize", prompt=text).json()
    assert tokens["count"] == len(tokens["tokens"]) > 1 and tokens["max_model_len"] == 4096
    assert slow.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    slow.chat("hi")
    chat = slow.post(
        "/tokenize",
        messages=[{"role": "user", "content": "hi"}],
        chat_template_kwargs={"enable_thinking": False},
    ).json()
    assert chat["tokens"] == slow.engine.requests[-1].tokens.tolist()
    assert slow.post("/tokenize", prompt="", messages=[]).status_code == 400
    assert slow.post("/tokenize", prompt="").json()["tokens"] == []
    assert slow.post("/detokenize", tokens=[999999]).json()["error"]["param"] == "tokens"


class Served:
    """`kakera.server.run.serve` in a thread, with its exit status."""

    def __init__(self, engine, model):
        self.port = free_port()
        self.status: int | None = None
        self.thread = threading.Thread(target=self._run, args=(engine, model), daemon=True)
        self.thread.start()
        end = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/health", verify=False)
                return
            except httpx.ConnectError:
                assert time.monotonic() < end
                time.sleep(0.01)

    def _run(self, engine, model) -> None:
        self.status = asyncio.run(serve_until_stopped(engine, model, port=self.port, log_level="error"))


class Impatient(TimedConnection):
    """Of its answers the kernel holds little, whatever the system's settings."""

    unread_seconds = 0.4

    def connection_made(self, transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        super().connection_made(transport)


FLOOD = [{"match": "flood", "text": "word " * 2000}, {"text": "Hello."}]
ENDLESS = {"stream": True, "max_tokens": 10**6, "ignore_eos": True, "loop_guard": False}
MESSAGES = [{"role": "user", "content": "flood"}]
FLOODS = {
    "/v1/completions": {"prompt": "flood", "logprobs": 20, **ENDLESS},
    "/v1/chat/completions": {"messages": MESSAGES, "n": 3, "logprobs": True, "top_logprobs": 20, **ENDLESS},
    "/v1/messages": {"messages": MESSAGES, **ENDLESS},
    "/v1/responses": {"input": "flood", "max_output_tokens": 10**6, **ENDLESS},
}


@contextlib.contextmanager
def flooded(live, path: str = "/v1/completions"):
    """A client whose answer never ends."""
    body = json.dumps(FLOODS[path])
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.settimeout(60)
        client.connect(("127.0.0.1", int(live.url.rpartition(":")[2])))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        live.wait_until(lambda: live.engine.open)
        yield client


@pytest.mark.parametrize("path", FLOODS)
def test_a_client_that_does_not_read_pauses_its_request_and_is_cut_off(serve, caplog, path):
    """The fake engine generates as it is read, without end: what it has generated is what all buffers hold."""
    live = serve(FLOOD, context=2 * 10**6, http=Impatient)
    with flooded(live, path) as client:
        live.wait_until(lambda: not live.engine.open)
        assert live.engine.steps < 2000
        assert len(live.engine.aborted) == FLOODS[path].get("n", 1)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(1 << 20):
                got += piece
        assert b"word" in got and len(got) < 64 * 1024
    assert "took nothing of its answer for 0.4 seconds" in caplog.text
    assert live.chat().json()["choices"][0]["message"]["content"] == "Hello."
    counted = f'kakera_requests_total{{finish_reason="abort",route="{path}"}} 1.0'
    assert counted in live.http.get("/metrics").text


def test_a_client_that_reads_slowly_is_not_cut_off(serve):
    live = serve(FLOOD, context=2 * 10**6, http=Impatient)
    with flooded(live) as client:
        began = last = time.monotonic()
        longest = 0.0  # for which this machine let us read nothing
        with contextlib.suppress(ConnectionResetError):
            while last - began < 4 * Impatient.unread_seconds and client.recv(4096):
                time.sleep(0.01)
                last, before = time.monotonic(), last
                longest = max(longest, last - before)
        assert not live.engine.aborted or longest > Impatient.unread_seconds / 4


def test_a_dead_engine_answers_who_waits_and_ends_the_server_with_70(model, tmp_path):
    engine = FakeEngine(tmp_path / "script.json", SLOW)
    engine.prefill_seconds = 60
    served = Served(engine, model)
    url = f"http://127.0.0.1:{served.port}/v1/chat/completions"
    answers: dict[bool, httpx.Response] = {}

    def wait_for(stream: bool) -> None:
        answers[stream] = httpx.post(url, json={**BODY, "stream": stream}, timeout=60, verify=False)

    threads = [threading.Thread(target=wait_for, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    while len(engine.open) < 2:
        time.sleep(0.01)
    engine.dead = True
    for thread in threads:
        thread.join(60)
    served.thread.join(60)
    assert served.status == EngineDied.exit_status == 70
    for answer in answers.values():
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_died"


def test_a_stream_that_has_begun_ends_with_an_error_event(slow):
    lines: list[str] = []
    with slow.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        for line in response.iter_lines():
            lines += [line] if line else []
            slow.engine.dead = len(lines) > 3
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["code"] == "engine_died" and error["type"] == "server_error"
    assert "[DONE]" not in lines[-1]


def test_refused_requests_are_logged_and_counted_once(serve, caplog):
    caplog.set_level(logging.INFO, "kakera.requests")
    server = serve([{"text": "x"}], max_waiting=0)
    server.chat(temperature=-1)
    server.chat("word " * 5000)
    server.post("/v1/completions", model="other", prompt="a")
    server.chat()  # 429 from the engine: its generation records it
    server.http.get("/invented?token=hidden")
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "kakera.requests"]
    assert [line["finish"] for line in lines] == [
        "invalid_value",
        "context_length_exceeded",
        "model_not_found",
        "queue_full",
        "http_404",
    ]
    assert (lines[0]["status"], lines[0]["param"]) == (400, "temperature")
    assert [line["route"] for line in lines[2:]] == ["/v1/completions", "/v1/chat/completions", "/invented"]
    assert {line["client"] for line in lines} == {"127.0.0.1"}
    counts = [line for line in server.http.get("/metrics").text.splitlines() if "kakera_requests_total{" in line]
    assert len(counts) == 5 and all(line.endswith(" 1.0") for line in counts)
    assert any('finish_reason="http_404",route="other"' in line for line in counts)
