"""Large bodies: what no context holds is refused before the work, nobody waits behind it, and it ends with its client.

By structure and not by the clock: who is called, how often, in which thread; a stand-in for the tokenizer's library
waits until the test lets it go on.
"""

import json
import logging
import re
import select
import socket
import threading
import time

import pytest
from live_server import Live

from kakera.server.http import body as body_module
from kakera.server.http.request_limits import BODIES_HELD, BODY_BYTES, LARGE_BYTES, LEAST_BODY_BYTES, body_limit
from kakera.server.openai import sampling
from kakera.text.tokenizer import SegmentCache

LONG = "word " * 220_000  # beyond what is not estimated (text/tokenizer.py: SMALL)
SAID = [{"role": "user", "content": LONG}]
PROMPTS = [
    ("/v1/chat/completions", {"messages": SAID}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG[:500]}] * 1000}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": LONG, "parameters": {}}}],
        },
    ),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": ["hi", LONG]}),
    ("/v1/completions", {"prompt": LONG, "parse_special": True}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/responses", {"input": "hi", "instructions": LONG}),
    ("/v1/messages", {"messages": SAID, "max_tokens": 5}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "system": LONG, "max_tokens": 5}),
]
COUNTED = [
    ("/v1/messages/count_tokens", {"messages": SAID}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": SAID}),
]


class Library:
    """Stands where the tokenizer calls its library. Texts of more than 1,000 characters wait until it is open, and
    have a token for each five characters."""

    def __init__(self, ids):
        self._ids = ids
        self.long_texts = 0
        self.open = threading.Event()
        self.open.set()

    def __call__(self, text: str) -> list[int]:
        if len(text) <= 1000:
            return self._ids(text)
        self.long_texts += 1
        assert self.open.wait(60)
        return [1] * (len(text) // 5)


@pytest.fixture
def library(model, monkeypatch):
    library = Library(model.tokenizer._ids)
    monkeypatch.setattr(model.tokenizer, "_ids", library)
    monkeypatch.setattr(model.tokenizer, "_cache", SegmentCache())
    yield library
    library.open.set()


def send(live: Live, path: str, body: dict) -> socket.socket:
    """A client that has sent its request and waits."""
    data = json.dumps(body).encode()
    host, port = live.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    client.sendall(head.encode() + data)
    return client


def unique(i: int, words: int = 36_000) -> dict:
    """190 KB that no test has sent before, so that no cache has them."""
    return {"messages": [{"role": "user", "content": f"{i} {time.monotonic()} " + "word " * words}], "max_tokens": 1}


def aborted(live: Live) -> float:
    return float(re.search(r"^kakera_aborted_total (\S+)", live.http.get("/metrics").text, re.M)[1])


@pytest.mark.parametrize(("path", "body"), PROMPTS)
def test_a_prompt_that_can_not_fit_is_refused_before_it_is_tokenised(live, library, path, body):
    response = live.post(path, **body)
    error = response.json()["error"]
    assert response.status_code == 400 and "4096" in error["message"] and "at least" in error["message"]
    assert path == "/v1/messages" or error["code"] == "context_length_exceeded"
    assert library.long_texts == 0


@pytest.mark.parametrize(("path", "body"), COUNTED)
def test_what_is_only_counted_may_be_longer_up_to_a_limit(live, library, monkeypatch, path, body):
    response = live.post(path, **body)
    answer = response.json()
    assert response.status_code == 200 and answer.get("count", answer.get("input_tokens")) >= 99_000
    monkeypatch.setattr(sampling, "COUNTED", 10_000)
    before = library.long_texts
    response = live.post(path, **body)
    assert response.status_code == 400 and "at most 10000 are counted" in response.json()["error"]["message"]
    assert library.long_texts == before


@pytest.mark.parametrize(("path", "fields"), [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")])
def test_what_may_fit_by_its_letters_ends_at_the_slice_in_which_it_does_not(live, library, path, fields):
    text = "qxzj vkwq " * 10_000  # 100,000 letters are 3,700 of the longest token, and are many more
    value = [{"role": "user", "content": text}] if fields == "messages" else text
    response = live.post(path, **{fields: value})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert library.long_texts == 1


def test_a_prompt_that_is_a_little_too_long_is_told_by_how_much(live):
    count = live.post("/tokenize", prompt="word " * 4200).json()["count"]
    message = live.post("/v1/completions", prompt="word " * 4200).json()["error"]["message"]
    assert (
        f"{count} tokens > 4095 maximum" in message
        and f"by {count - 4095} tokens" in message
        and "least" not in message
    )


def test_a_small_request_does_not_wait_behind_large_ones(serve, library):
    live = serve([{"text": "x"}], context=262_144)
    library.open.clear()
    clients = [send(live, "/v1/chat/completions", unique(i)) for i in range(6)]
    live.wait_until(lambda: library.long_texts >= 2)
    for _ in range(3):
        assert live.chat("hi").status_code == 200
        assert live.http.get("/health").status_code == 200
    assert library.long_texts == 2  # as many as there are threads
    library.open.set()
    for client in clients:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", unique(0)),
        ("/v1/chat/completions", {**unique(1), "stream": True}),
        ("/v1/completions", {"prompt": unique(2)["messages"][0]["content"]}),
        ("/v1/responses", {"input": unique(3)["messages"][0]["content"]}),
        ("/v1/messages", unique(4)),
        ("/v1/messages/count_tokens", {"messages": unique(5)["messages"]}),
        ("/tokenize", {"prompt": unique(6)["messages"][0]["content"]}),
    ],
)
def test_work_ends_when_its_client_leaves(serve, library, path, body):
    live = serve([{"text": "x"}], context=262_144)
    library.open.clear()
    working = [send(live, path, body) for _ in range(2)]
    live.wait_until(lambda: library.long_texts == 2)
    waiting = [send(live, path, body) for _ in range(2)]
    for client in (*working, *waiting):
        client.close()
    live.wait_until(lambda: aborted(live) >= 2)
    library.open.set()
    response = live.post(
        "/tokenize", prompt=f"{time.monotonic()} " + "a " * LARGE_BYTES
    )  # behind them, in their threads
    assert response.status_code == 200
    assert library.long_texts == 2 + 2 and not live.engine.requests  # two slices of this one, no more of theirs


def test_too_many_large_bodies_are_a_429_and_a_place_is_free_again(serve, library):
    live = serve([{"text": "x"}], context=262_144, body_limit=200_000)
    library.open.clear()
    clients = [send(live, "/v1/chat/completions", unique(i)) for i in range(4)]
    live.wait_until(lambda: library.long_texts == 2)
    full = []

    def refused() -> bool:  # the last of the four may be on its way yet
        full.append(live.post("/v1/chat/completions", **unique(9)))
        return full[-1].status_code == 429

    time.sleep(0.1)
    live.wait_until(refused)
    assert full[-1].json()["error"]["code"] == "queue_full" and int(full[-1].headers["retry-after"]) > 0
    assert live.chat("hi").status_code == 200
    library.open.set()
    for client in clients:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.close()
    assert live.post("/v1/chat/completions", **unique(10)).status_code == 200


def test_time_counts_from_receipt(serve, library, caplog):
    caplog.set_level(logging.INFO, "kakera.requests")
    live = serve([{"text": "x"}], context=262_144)
    library.open.clear()
    client = send(live, "/v1/chat/completions", unique(0))
    live.wait_until(lambda: library.long_texts)
    time.sleep(0.3)
    library.open.set()
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    client.close()
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "kakera.requests"]
    assert lines[-1]["queue_s"] >= 0.3 and lines[-1]["ttft_s"] >= 0.3 and lines[-1]["total_s"] >= 0.3
    text = live.http.get("/metrics").text
    sums = [line for line in text.splitlines() if line.startswith("kakera_") and "_sum" in line]
    for name in ("kakera_queue_seconds", "kakera_time_to_first_token_seconds", "kakera_request_seconds"):
        assert float(next(line for line in sums if line.startswith(name)).split()[-1]) >= 0.3


def test_large_bodies_are_read_off_the_event_loop(live, monkeypatch):
    threads = []
    parse = body_module.parse
    monkeypatch.setattr(body_module, "parse", lambda b: threads.append(threading.current_thread().name) or parse(b))
    for path, field in (("/tokenize", "prompt"), ("/v1/completions", "prompt"), ("/v1/responses", "input")):
        live.post(path, **{field: "a " * LARGE_BYTES})
        live.post(path, **{field: "a"})
        large, small = threads[-2:]
        assert large.startswith("large-body") and not small.startswith("large-body")


@pytest.mark.parametrize("unit", [b"[1]", b"{}", b"7", b'"a"'])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/detokenize"]
)
def test_millions_of_elements_are_refused_before_they_are_read(live, monkeypatch, path, unit):
    def never(*args, **options):
        raise AssertionError("it was read")

    monkeypatch.setattr("kakera.server.http.body.json.loads", never)
    field = {"/v1/completions": b"prompt", "/v1/responses": b"input", "/detokenize": b"tokens"}.get(path, b"messages")
    body = b'{"%s":[' % field + b",".join([unit] * (4_000_000 // (len(unit) + 1))) + b"]}"
    response = live.http.post(path, content=body, headers={"content-type": "application/json"})
    monkeypatch.undo()
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "lists and objects" in message and ("limit" in message or "than" in message)


def test_json_within_a_text_has_the_same_limit(live):
    nested = '{"a":[' + ",".join(["[1]"] * 200_000) + "]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": nested}}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": nested}
    asked = {"messages": said[:1], "guided_json": nested}
    response = live.post("/v1/chat/completions", **asked)
    assert response.status_code == 400 and "lists and objects" in response.json()["error"]["message"]
    for path, body in (  # of a history it is text, and here too much of it
        ("/v1/chat/completions", {"messages": said}),
        ("/tokenize", {"messages": said}),
        ("/v1/responses", {"input": [item]}),
    ):
        response = live.post(path, **body)
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded", path


def test_a_declared_length_is_refused_before_the_body_is_sent(live):
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {10 * BODY_BYTES}\r\n\r\n"
        client.sendall(head.encode())
        answer = b""
        while b"}}" not in answer:
            answer += client.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413") and str(LEAST_BODY_BYTES).encode() in answer and b"--context" in answer


def test_the_largest_body_follows_the_context():
    assert body_limit(4096, 27) == LEAST_BODY_BYTES < body_limit(131_072, 27) < body_limit(262_144, 27) <= BODY_BYTES
    assert body_limit(131_072, 128) == 131_072 * 128 and body_limit(1_048_576, 128) == BODY_BYTES


def test_bodies_that_do_not_end_hold_no_more_than_a_bound_all_together(serve, monkeypatch):
    trimmed = threading.Event()
    monkeypatch.setattr("kakera.server.http.intake._malloc_trim", lambda _: trimmed.set())
    monkeypatch.setattr("kakera.server.http.intake.IDLE_SECONDS", 0.05)
    live = serve([{"text": "x"}], body_limit=200_000)
    host, port = live.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 199000"
    clients = [socket.create_connection((host, int(port)), timeout=60) for _ in range(BODIES_HELD + 4)]
    for client in clients:
        client.sendall(head.encode() + b"\r\n\r\n" + b" " * 190_000)
    live.wait_until(lambda: len(select.select(clients, [], [], 0.2)[0]) >= 4)
    answers = [answer_of(client) for client in select.select(clients, [], [], 0.3)[0]]
    assert 4 <= len(answers) <= 5 and all(b" 503 " in said and b"bodies_in_flight" in said for said in answers)
    assert all(b"retry-after" in said.lower() for said in answers)
    assert live.post("/v1/completions", prompt="a" * 150_000).status_code == 503
    assert live.chat("hi").status_code == 200, "a small one waits for nobody"
    for client in clients:
        client.close()
    live.wait_until(lambda: live.post("/v1/completions", prompt="a" * 150_000).status_code != 503)
    assert trimmed.wait(60), "what the bodies had is given back"


def answer_of(client: socket.socket) -> bytes:
    said = b""
    while not said.rstrip().endswith(b"}") and (more := client.recv(4096)):
        said += more
    return said
