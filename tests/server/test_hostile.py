"""Bodies that nobody sends by accident: an answer in the 400s or a good one, never a 500."""

import json

import pytest

DEEP = "[" * 100_000 + "]" * 100_000
NEST = "[" * 900 + "]" * 900
NESTED_TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"x": ' + NEST + "}}}"
USER = '"messages": [{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}',
        '{"messages": [{"role": "user", "content": "\\u0000\\ufdd0"}]}',
        '{"messages": [{"role": "user", "content": "' + "".join(map(chr, range(0xFDD0, 0xFDF0))) + '"}]}',
        "{" + USER + ', "tools": [{"type": "function", "function": {"name": "\\udfff", "parameters": {}}}]}',
        "{" + USER + ', "stop": "\\ud800"}',
        "{" + USER + ', "chat_template_kwargs": {"messages": 1, "tools": 2, "self": 3, "enable_thinking": [1]}}',
        "{" + USER + ', "logit_bias": {"' + "9" * 5000 + '": 1}}',
        "{" + USER + ', "top_k": ' + "9" * 30 + "}",
        "{" + USER + ', "max_tokens": ' + "9" * 30 + "}",
        "{" + USER + ', "seed": ' + "9" * 5000 + "}",
        "{" + USER + f', "x": {DEEP}}}',
        "{"
        + USER
        + f', "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {NEST}}}}}}}]}}',
        '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '
        + json.dumps(DEEP)
        + "}}]}]}",
        "{" + USER + ', "chat_template_kwargs": {"enable_thinking": {"a": 1}}}',
        "{" + USER + ', "reasoning_effort": "none", "enable_thinking": "maybe"}',
    ],
    ids=range(16),
)
def test_never_a_500(live, body):
    response = live.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text[:300]
    if response.status_code == 400:
        assert response.json()["error"]["message"]
    assert live.chat().status_code == 200


@pytest.mark.parametrize("body", ['{"prompt": "\\ud800"}', '{"prompt": [' + "9" * 30 + "]}", f'{{"prompt": {DEEP}}}'])
def test_never_a_500_for_completions(live, body):
    response = live.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text[:300]


def test_the_openapi_document_can_be_made(live):
    paths = live.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/tokenize"} <= paths.keys()


def test_thousands_of_prompts_in_one_body_are_refused(live):
    for prompt in (["a"] * 2049, [[5]] * 2049):
        response = live.post("/v1/completions", prompt=prompt, max_tokens=1)
        assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
