"""POST .../render: the tokens that a request's prompt would have, without running it."""

import pytest

CHAT = {"messages": [{"role": "user", "content": "the fox <|im_end|>"}]}
CASES = {
    "/v1/chat/completions": {**CHAT, "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 1},
    "/v1/completions": {"prompt": ["the fox", "jumps"], "max_tokens": 1, "stream": True},
    "/v1/responses": {"input": "the fox", "instructions": "be brief", "max_output_tokens": 1},
}


@pytest.mark.parametrize("path", CASES)
def test_what_is_rendered_is_what_the_engine_gets(live, path):
    before = len(live.engine.requests)
    answer = live.post(f"{path}/render", **CASES[path])
    assert answer.status_code == 200 and len(live.engine.requests) == before
    found = answer.json() if path == "/v1/completions" else [answer.json()]
    assert live.post(path, **CASES[path]).status_code == 200
    assert [each["token_ids"] for each in found] == [r.tokens.tolist() for r in live.engine.requests[before:]]
    assert {each["stream"] for each in found} == {CASES[path].get("stream", False)}
    assert all(each["features"] is None and each["model"] == "mini" for each in found)


@pytest.mark.parametrize("path", CASES)
def test_what_can_not_be_rendered_is_refused_as_it_is_without(live, path):
    assert live.post(f"{path}/render", **CASES[path], model="other").status_code == 404
    assert live.post(f"{path}/render").status_code == 400
