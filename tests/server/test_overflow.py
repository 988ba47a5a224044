"""A prompt that is too long is told in the words, and at the place, by which agents know it, or a session ends.

The patterns were read in the sources of these clients; each is applied to what the client has in hand: the message of
the body's error, its code, or the last event of a stream.
"""

import json
import re

import httpx
import pytest
from test_enforced import BODIES, CHAT, MESSAGES, RESPONSES, TEXT

LONG = "word " * 5_000
OVERFLOW = {
    CHAT: {"messages": [{"role": "user", "content": LONG}]},
    TEXT: {"prompt": LONG},
    MESSAGES: {"messages": [{"role": "user", "content": LONG}]},
    RESPONSES: {"input": LONG},
}
CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
OPENCODE = [  # provider/error.ts; any of them
    re.compile(r"prompt is too long", re.IGNORECASE),
    re.compile(r"maximum context length is \d+ tokens", re.IGNORECASE),
]
CLINE_OPENAI = re.compile(r"\bcontext\s*(?:length|window)\b", re.IGNORECASE)  # context-error-handling.ts, status 400
CLINE_ANTHROPIC = "prompt is too long"  # beside the type invalid_request_error
LITELLM = ["this model's maximum context length is", "prompt is too long"]  # aider: ContextWindowExceededError
CODEX = "context_length_exceeded"  # the code of response.failed
REQUEST_TOO_LARGE = re.compile(r"request entity too large", re.IGNORECASE)  # opencode, of a 413
NO_OVERFLOW = re.compile(r"rate limit|too many requests|throttl", re.IGNORECASE)  # would be tried again as it is


def check_words(message: str, limit: int) -> None:
    tokens, most = map(int, CLAUDE_CODE.search(message).groups())
    assert tokens > most == limit - 1
    assert all(pattern.search(message) for pattern in OPENCODE)
    assert f"maximum context length is {limit} tokens" in message
    assert CLINE_OPENAI.search(message) and CLINE_ANTHROPIC in message
    assert all(words in message.lower() for words in LITELLM)
    assert not NO_OVERFLOW.search(message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT, TEXT, MESSAGES])
@pytest.mark.parametrize("times", [1, 40])  # counted to its end, or refused before
def test_an_overflow_has_the_words_that_agents_look_for(live, route, stream, times):
    body = json.loads(json.dumps({**BODIES[route], **OVERFLOW[route]}).replace(LONG, LONG * times))
    answer = live.post(route, **body, stream=stream)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    check_words(error["message"], 4096)
    assert route == MESSAGES or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("times", [1, 40])
def test_responses_tell_it_whole_by_status_and_streamed_by_an_event(live, times):
    body = {**BODIES[RESPONSES], "input": LONG * times}
    whole = live.post(RESPONSES, **body)
    assert whole.status_code == 400 and whole.json()["error"]["code"] == CODEX
    check_words(whole.json()["error"]["message"], 4096)
    stream = live.post(RESPONSES, **body, stream=True)
    assert stream.status_code == 200 and stream.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(part.split("data: ")[1]) for part in stream.text.strip().split("\n\n")]
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1]
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == CODEX
    check_words(failed["error"]["message"], 4096)
    assert 'finish_reason="context_length_exceeded",route="/v1/responses"' in live.http.get("/metrics").text


def test_the_openai_client_reads_the_failed_stream(live):
    events = list(live.client.responses.create(model="mini", input=LONG, stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error.code == CODEX


def test_a_prompt_that_only_lacks_room_for_its_answer_is_too_long_by_one(live):
    ids = [5] * 4096
    check_words(live.post(TEXT, prompt=ids, max_tokens=1).json()["error"]["message"], 4096)
    assert live.post(TEXT, prompt=ids[1:], max_tokens=1).status_code == 200


@pytest.mark.parametrize("route", OVERFLOW)
def test_a_body_that_is_too_large_is_an_overflow_too(serve, route):
    server = serve([{"text": "x"}], body_limit=10_000)
    answer = server.post(route, **{**BODIES[route], **OVERFLOW[route]})
    assert answer.status_code == 413
    message = answer.json()["error"]["message"]
    assert REQUEST_TOO_LARGE.search(message) and OPENCODE[0].search(message)
    if route == MESSAGES:
        assert answer.json()["error"]["type"] == "request_too_large"


@pytest.mark.parametrize("route", OVERFLOW)
def test_other_errors_stand_where_clients_look_and_are_no_overflow(serve, route):
    """(status, OpenAI's code, Anthropic's type) of each kind of error that a client acts on."""
    server = serve([{"text": "x"}], max_waiting=0, keys=("secret",))
    asked = {"Authorization": "Bearer secret"}

    def post(headers: dict[str, str], **more) -> httpx.Response:
        return server.http.post(route, json={**BODIES[route], **more}, headers=headers)

    kinds = [
        (post({}), 401, "invalid_api_key", "authentication_error"),
        (post(asked, model="other"), 404, "model_not_found", "not_found_error"),
        (post(asked, temperature=-1), 400, "invalid_value", "invalid_request_error"),
        (post(asked), 429, "queue_full", "rate_limit_error"),
    ]
    for answer, status, code, kind in kinds:
        error = answer.json()["error"]
        assert answer.status_code == status and error["type"] == kind
        assert answer.json().get("type") == "error" if route == MESSAGES else error["code"] == code
        assert not any(pattern.search(error["message"]) for pattern in OPENCODE)
    assert int(kinds[-1][0].headers["retry-after"]) > 0
