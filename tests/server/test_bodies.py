"""Bodies as JSON: what is none is refused in words, in the dialect's shape; what is odd is answered all the same."""

import gzip
import json
import time

import pytest
from live_server import Live, start

from kakera.server.anthropic.input import messages_chat
from kakera.server.anthropic.schema import CountBody
from kakera.server.responses.input import responses_chat
from kakera.server.responses.schema import ResponsesBody

HALF = "\\ud83d"  # an emoji that a client has cut
ROUTES = {
    "/v1/chat/completions": '"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3',
    "/v1/completions": '"prompt": "hi", "max_tokens": 3',
    "/v1/responses": '"input": "hi", "max_output_tokens": 16',
    "/v1/messages": '"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3',
    "/v1/messages/count_tokens": '"messages": [{"role": "user", "content": "hi"}]',
    "/tokenize": '"prompt": "hi"',
    "/detokenize": '"tokens": [1]',
}
SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}, "o": {"type": "object"}}}


def send(live: Live, path: str, body: str | bytes, **headers: str):
    return live.http.post(path, content=body, headers={"content-type": "application/json", **headers})


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("NaN", "not JSON: NaN"),
        ('{"a": [-Infinity]}', "not JSON: -Infinity"),
        ("-1e999", "-1e999, which is too large"),
        ("9" * 4301, "more than 4300 digits"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("nothing", "not JSON: Expecting value"),
    ],
)
def test_what_is_not_json_is_refused_wherever_it_stands(live, path, value, words):
    response = send(live, path, f'{{{ROUTES[path]}, "anything": {value}}}')
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"] and path not in error["message"]
    assert error["type"] == "invalid_request_error" and ("type" in response.json()) == path.startswith("/v1/messages")


@pytest.mark.parametrize(
    ("headers", "body", "status", "words"),
    [
        ({"content-type": "application/x-www-form-urlencoded"}, "{}", 400, "Content-Type: application/json"),
        ({}, "", 400, "must be a JSON object"),
        ({}, "null", 400, "must be a JSON object"),
        ({}, b'{"messages": "\xff"}', 400, "not UTF-8: invalid start byte at byte 14"),
        ({}, b'{"a": "\xed\xa0\xbd"}', 400, "not UTF-8"),
        ({}, "{}".encode("utf-16"), 400, "not UTF-8"),
        ({"content-encoding": "gzip"}, gzip.compress(b"{}", mtime=0), 415, "Content-Encoding: gzip; send it as it is"),
    ],
)
def test_a_body_that_can_not_be_read_says_why(live, headers, body, status, words):
    for path in ROUTES:
        response = send(live, path, body, **headers)
        assert response.status_code == status and words in response.json()["error"]["message"], path


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "field",
    [
        f'"instructions": "{HALF}"',
        f'"user": "{HALF}"',
        f'"metadata": {{"{HALF}": "{HALF}"}}',
        f'"text": {{"format": {{"type": "text", "x": "{HALF}"}}}}',
        f'"reasoning": {{"effort": "low", "x": ["{HALF}"]}}',
        f'"tools": [{{"type": "function", "name": "f{HALF}", "parameters": {{"{HALF}": 1}}}}]',
    ],
)
def test_half_an_emoji_comes_back_as_a_replacement(live, stream, field):
    body = f'{{{ROUTES["/v1/responses"]}, "stream": {json.dumps(stream)}, {field}}}'
    response = send(live, "/v1/responses", body)
    assert response.status_code == 200 and "\ufffd" in response.text
    assert not stream or "response.completed" in response.text


def test_a_whole_emoji_stays_one(live):
    response = send(live, "/tokenize", '\ufeff{"prompt": "\\ud83d\\ude00 \\\\ud83d"}'.encode())
    assert live.post("/detokenize", tokens=response.json()["tokens"]).json()["prompt"] == "😀 \\ud83d"


@pytest.fixture(scope="module")
def calling(model, tmp_path_factory):
    as_json = json.dumps({"name": "f", "arguments": {"s": "a\ud83d"}})
    as_xml = '<function=f>\n<parameter=o>\n{"s": "a\\ud83d"}\n</parameter>\n</function>'
    streams = [{"match": kind, "text": f"<tool_call>\n{text}\n</tool_call>"} for kind, text in
               (("json", as_json), ("xml", as_xml))]  # fmt: skip
    with start(model, tmp_path_factory.mktemp("calling") / "script.json", streams) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["json", "xml"])
@pytest.mark.parametrize(
    ("path", "tool", "more", "end"),
    [
        ("/v1/chat/completions", {"function": {"name": "f", "parameters": SCHEMA}}, {}, "[DONE]"),
        ("/v1/responses", {"name": "f", "parameters": SCHEMA}, {"input": "?"}, "response.completed"),
        ("/v1/messages", {"name": "f", "input_schema": SCHEMA}, {"max_tokens": 99}, "message_stop"),
    ],
)
def test_half_an_emoji_in_a_call_of_the_model_does_not_end_the_answer(calling, stream, kind, path, tool, more, end):
    tools = [tool if "messages" in path else {"type": "function", **tool}]
    said = {"input": kind} if "input" in more else {"messages": [{"role": "user", "content": kind}]}
    response = calling.post(path, tools=tools, stream=stream, **{**more, **said})
    assert response.status_code == 200 and "\ufffd" in response.text and (end in response.text) == stream


MESSAGE = '{"role": "user", "content": ""}'
TEXT = '{"type": "text", "text": "a"}'
MANY = 100_000


@pytest.mark.parametrize(
    ("path", "field", "item", "param"),
    [
        ("/v1/chat/completions", '"messages": [%s]', "1", "messages[0]"),
        ("/v1/chat/completions", '"messages": [%s]', MESSAGE, "messages"),
        ("/v1/chat/completions", '"messages": [{"role": "user", "content": [%s]}]', "1", "messages[0].content"),
        ("/v1/chat/completions", '"messages": [{"role": "user", "content": [%s]}]', TEXT, "messages[0].content"),
        ("/v1/chat/completions", '"tools": [%s]', "{}", "tools[0].type"),
        ("/v1/chat/completions", '"stop_token_ids": [%s]', '"a"', "stop_token_ids[0]"),
        ("/v1/chat/completions", '"stop": [%s]', "1", "stop"),
        ("/v1/chat/completions", '"logit_bias": {%s}', '"%d": "a"', "logit_bias"),
        ("/v1/completions", '"prompt": [%s]', "null", "prompt[0]"),
        ("/v1/completions", '"prompt": [[%s]]', "null", "prompt[0][0]"),
        ("/v1/responses", '"input": [%s]', "1", "input[0]"),
        ("/v1/responses", '"input": [%s]', MESSAGE, "input"),
        ("/v1/responses", '"tools": [{"type": "namespace", "name": "n", "tools": [%s]}]', "1", "tools[0].tools[0]"),
        ("/v1/responses", '"metadata": {%s}', '"%d": 1', "metadata"),
        ("/v1/messages", '"messages": [%s]', MESSAGE, "messages"),
        ("/v1/messages", '"messages": [{"role": "user", "content": [%s]}]', TEXT, "messages[0].content"),
        ("/v1/messages", '"system": [%s]', "1", "system[0]"),
        ("/detokenize", '"tokens": [%s]', "-1", "tokens[0]"),
    ],
)
def test_a_long_list_of_wrong_entries_is_refused_by_its_first_or_by_its_length(live, path, field, item, param):
    """The check runs on the event loop: hundreds of thousands of errors would hold everybody up."""
    entries = ", ".join(item % i if "%d" in item else item for i in range(MANY))
    began = time.process_time()
    response = send(live, path, f"{{{ROUTES[path]}, {field % entries}}}")
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(param), response.text[:200]
    assert time.process_time() - began < 4  # 0.2 seconds; it was 4 and more


PIECE = "a" * 1500
SPLIT = [{"type": "text", "text": PIECE}] * 19_000
SAID = [{"role": "assistant", "content": PIECE}, {"type": "reasoning", "content": [SPLIT[0]]}] * 9_500


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (messages_chat, CountBody(messages=[{"role": "user", "content": SPLIT}])),
        (messages_chat, CountBody(messages=[{"role": "assistant", "content": SPLIT}])),
        (responses_chat, ResponsesBody(input=[{"role": "user", "content": SPLIT}])),
        (responses_chat, ResponsesBody(input=SAID)),
    ],
)
def test_many_small_parts_are_joined_in_time(read, body):
    """A string that grows by each of them would be copied for half a minute."""
    began = time.process_time()
    read(body)
    assert time.process_time() - began < 4  # 0.1 seconds
