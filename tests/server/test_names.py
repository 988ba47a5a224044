"""Names that a model is asked for by: its own, aliases, any; and what routers and clients are told of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from live_server import HELLO, start

from kakera.hub.names import Source
from kakera.server.model import ServedModel

MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
SOURCE = Source("owner/name", "3.0bpw", "c" * 40)


@pytest.mark.parametrize("any_name", [False, True])
def test_each_dialect_answers_to_the_names_that_are_served(model: ServedModel, tmp_path: Path, any_name: bool) -> None:
    named = replace(model, name="first", aliases=("claude-x", "org/gpt"), any_name=any_name, source=SOURCE)
    with start(named, tmp_path / "script.json", HELLO) as live:
        for route, body in BODIES.items():
            got = {name: live.post(route, model=name, **body) for name in ("first", "claude-x", "default", "other")}
            assert [answer.status_code for answer in got.values()] == [200, 200, 200, 200 if any_name else 404], route
            if not any_name:
                assert "'other' is not served here; 'first' and 'claude-x' and 'org/gpt' are" in got["other"].text
        chat = live.post("/v1/chat/completions", model="claude-x", messages=MESSAGES).json()
        assert chat["model"] == "first"
        listed = live.http.get("/v1/models").json()["data"]
        assert [item["id"] for item in listed] == ["first", "claude-x", "org/gpt"]
        assert live.http.get("/v1/models/org/gpt").json()["id"] == "org/gpt"
        other = live.http.get("/v1/models/other")
        assert (other.status_code, other.json().get("id")) == ((200, "first") if any_name else (404, None))
        info = live.http.get("/get_model_info").json()
        assert (info["model_path"], info["repository"], info["revision"], info["commit"]) == (
            *("first", "owner/name"),
            *("3.0bpw", "c" * 40),
        )
