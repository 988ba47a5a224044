"""Grammars made to kill or to stall: a 400 in each dialect and from each field, and the next client is served."""

from __future__ import annotations

import json

import pytest

DEFS = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1_000)}
CHAIN = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "required": ["x"], "$defs": DEFS}
CHAIN["$defs"] = {**DEFS, "d1000": {"type": "integer"}}
CHAIN["additionalProperties"] = False
LARK = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2_800)) + '\nr2800: "a"'
SLOW = "a*b?" * 10_000
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SAID = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
FORM = {"type": "json_schema", "schema": CHAIN, "name": "x"}
TOOL = {"name": "f", "parameters": CHAIN}
WISHES = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CHAIN}}}),
    (CHAT, {"response_format": {"type": "grammar", "grammar": LARK}}),
    (CHAT, {"response_format": {"type": "regex", "regex": SLOW}}),
    (CHAT, {"guided_json": CHAIN}),
    (CHAT, {"guided_json": json.dumps(CHAIN)}),
    (CHAT, {"guided_grammar": LARK}),
    (CHAT, {"guided_grammar": "start: %json " + json.dumps(CHAIN)}),
    (CHAT, {"guided_regex": SLOW}),
    (CHAT, {"guided_regex": "a{1000000}"}),
    (CHAT, {"structured_outputs": {"json": CHAIN}}),
    (CHAT, {"tools": [{"type": "function", "function": {**TOOL, "strict": True}}]}),
    (TEXT, {"guided_json": CHAIN}),
    (TEXT, {"structured_outputs": {"grammar": LARK}}),
    (TEXT, {"guided_json": {"type": "string", "pattern": SLOW}}),
    (MESSAGES, {"output_config": {"format": FORM}}),
    (RESPONSES, {"text": {"format": FORM}}),
    (RESPONSES, {"tools": [{"type": "function", "strict": True, **TOOL}]}),
]


@pytest.fixture(scope="module")
def live(model, tmp_path_factory):
    from live_server import start

    script = tmp_path_factory.mktemp("hostile") / "script.json"
    with start(model, script, [{"text": "Plain words."}], context=200_000) as server:  # tools stand in the prompt
        yield server


def body(path: str) -> dict:
    said = {TEXT: {"prompt": "hi", "max_tokens": 5}, RESPONSES: {"input": "hi", "max_output_tokens": 16}}
    return {"model": "mini", **said.get(path, SAID)}


@pytest.mark.parametrize(("path", "wish"), WISHES)
def test_a_hostile_grammar_is_a_400_that_names_its_limit(live, path, wish):
    response = live.post(path, **body(path), **wish)
    assert response.status_code == 400, response.text[:300]
    assert "the limit is" in response.json()["error"]["message"]
    assert live.chat("hi").status_code == 200


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_tool_that_is_not_strict_is_offered_with_its_types_alone(live, path):
    tool = {"type": "function", "function": TOOL} if path == CHAT else {"type": "function", "strict": False, **TOOL}
    tool = {"name": "f", "input_schema": CHAIN} if path == MESSAGES else tool
    assert live.post(path, **body(path), tools=[tool]).status_code == 200
